"""Generated from the .proto files beside it by `make proto`; do not edit."""
