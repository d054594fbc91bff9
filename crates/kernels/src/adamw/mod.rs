//! adamw
