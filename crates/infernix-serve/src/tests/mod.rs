//! The server from outside, over an engine that plays scripts.

mod bodies;
mod checker;
mod client;
mod edges;
mod engine;
mod faults;
mod fuzz;
mod operation;
mod property;
mod protocols;
mod security;
