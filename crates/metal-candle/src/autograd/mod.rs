//! Autograd.
