"""The measurements that methods make once a model, and the file that keeps them."""
