"""How files move between disks, object stores and web servers: hashed, and bounded in size and time."""
