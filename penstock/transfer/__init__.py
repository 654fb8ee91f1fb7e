"""Moving keys and values below the device: stores, and who carries blocks there and back."""
