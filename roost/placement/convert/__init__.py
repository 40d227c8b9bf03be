"""Write a plan in another notation; the result is planned again and compared."""
