"""What is done with any batch before its ids travel: its form, its ids, its batch sizes."""
