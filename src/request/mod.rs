//! The request, parsed once: endpoint, top-level fields, prompt text. Nested bytes are never re-serialised.

mod body;
mod coding;
mod credential;
pub mod embeddings;
mod endpoint;
mod multipart;
mod parts;
mod prompt;
mod salt;
pub(crate) mod scan;
mod splice;
mod stored;
#[cfg(test)]
mod tests;

pub use body::{BodyError, ParsedBody};
pub use coding::{ACCEPTED as ACCEPTED_CODINGS, Coding, DecodeError, UnreadableForm, decode};
pub use credential::credential;
pub use endpoint::Endpoint;
pub use parts::NonText;
pub use prompt::{Prompt, PromptForm};
pub use scan::Field;
pub use splice::{Edit, splice};
pub use stored::StoredResponse;
