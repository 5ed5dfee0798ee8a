"""One pool of GPUs for all libvirt/KVM hosts. Its face is its version; everything else is imported by full path."""

__version__ = "0.1.0"
