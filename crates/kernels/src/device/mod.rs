//! What the operations share for one device.

pub(crate) mod cpu;
