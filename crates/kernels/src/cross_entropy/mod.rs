//! cross_entropy
