"""One step of the model, on one device: C++ on the CPU, or readable PyTorch."""
