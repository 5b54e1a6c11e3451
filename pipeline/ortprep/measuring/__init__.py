"""How figures are taken and compared: who measures when, on what inputs, and what is noise."""
