"""Results as CSVs, tables and pictures; started as a program, it draws the pictures of docs/results again."""
