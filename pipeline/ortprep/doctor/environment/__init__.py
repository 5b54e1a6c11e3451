"""`doctor env`: is this machine set up well for ONNX Runtime?"""
