//! integration
fn main() {}
