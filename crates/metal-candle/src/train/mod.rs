//! Train.
