"""What rollcast's training engines share, and an author of another can build on."""
