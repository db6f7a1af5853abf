//! The request, parsed once: endpoint, top-level fields, prompt text. Nested bytes are never re-serialised.

mod body;
mod credential;
mod endpoint;
mod multipart;
mod prompt;
pub(crate) mod scan;
mod splice;
#[cfg(test)]
mod tests;

pub use body::{BodyError, ParsedBody};
pub use credential::credential;
pub use endpoint::Endpoint;
pub use prompt::{Prompt, PromptForm};
pub use scan::Field;
pub use splice::{Edit, splice};
