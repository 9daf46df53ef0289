"""What the project measures about itself: speed, accuracy, and what its kernels cost."""
