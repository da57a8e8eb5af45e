"""`dbsp generate`: decides a job, starts ranks, follows them, and puts the video in place."""
