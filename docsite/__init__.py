"""What builds and checks the documents: line breaks, generated reference pages, the picture of a trace."""
