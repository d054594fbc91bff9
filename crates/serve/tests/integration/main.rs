//! The server over HTTP, with the demo's model.

mod asking;
mod conversations;
mod hub;
mod jobs;
mod leaving;
mod limits;
mod markers;
mod protocols;
mod replicas;
mod texts;
mod thoughts;
mod tokens;
