//! The request, parsed once: endpoint, top-level fields, prompt text. Nested bytes are never re-serialised.

mod body;
mod endpoint;
mod prompt;
mod splice;

pub use body::{BodyError, Field, ParsedBody};
pub use endpoint::Endpoint;
pub use prompt::{Prompt, PromptForm};
pub use splice::{Edit, splice};
