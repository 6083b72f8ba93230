"""What ranks tell each other besides the data of operators, and how they wait."""
