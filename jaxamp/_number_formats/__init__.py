"""Number formats of any width: which numbers they have, and how float32 or narrower values are rounded to them."""
