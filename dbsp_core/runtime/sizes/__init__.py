"""What is made for each size of video."""
