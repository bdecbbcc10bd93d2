"""Small programs of the documentation. Tests run them."""
