"""Bundles as models of NVIDIA Triton's ONNX Runtime backend.

options       what of a variant's options the backend takes
placement     a variant's files in the export, and their trial in a child
model_config  `config.pbtxt`, of Triton's own messages
repository    which variants are exported, and the models of a repository, each written whole or not at all
"""
