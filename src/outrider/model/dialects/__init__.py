"""Published layouts of drafters: each dialect is a file, read into one of our heads."""
