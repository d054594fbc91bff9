//! Kernels that are right and kernels that are wrong, run by the emulator.

mod faults;
mod kernels;
