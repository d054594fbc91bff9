//! The work that is timed, and the document that is computed.

mod floors;
mod outputs;
