"""Which values share memory, when memory is free again, and where storages lie."""
