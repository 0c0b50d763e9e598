"""Operations: one file each, with what it computes (`reference`), how it is launched and what it
costs.

File name = kernel source name = test name. Public surface: the operation classes, imported from
their own files.
"""
