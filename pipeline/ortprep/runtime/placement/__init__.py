"""What runs where on a machine, decided before anything is started.

devices      which devices there are, what "all" means, and the environment of a process on one of them
assignment   what a bundle's model takes of a device, and which model goes to which device
"""
