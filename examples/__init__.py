"""Small programs that the documentation shows; tests run them."""
