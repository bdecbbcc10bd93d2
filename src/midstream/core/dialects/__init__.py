"""What hosts say to a gateway and hear from it, in the words of three APIs. Pure: bytes in, values out, and back."""
