//! glu
