//! rms_norm
