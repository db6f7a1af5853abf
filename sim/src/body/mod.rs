//! Request bodies, read the way the engines' schemas read them. What is wrong with one is said here, how each engine
//! words it is said there.

mod fields;
mod render;

pub(crate) use fields::{Fields, shown};
pub(crate) use render::{completion, conversation};

/// What is wrong with a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Complaint {
    /// There is none.
    Empty,
    /// It is not JSON from this byte on.
    InvalidJson {
        /// Byte offset.
        offset: usize,
    },
    /// It does not fit the schema.
    Schema {
        /// The validator's name of the problem.
        kind: &'static str,
        /// Where, below the body; parts are separated by dots.
        place: String,
        /// What the validator says.
        text: String,
        /// The offending value as the validator shows it.
        input: String,
    },
    /// `messages` is an empty list.
    EmptyConversation,
    /// The prompt is missing or empty.
    EmptyPrompt {
        /// The field.
        name: String,
    },
}

impl Complaint {
    /// The body does not fit the schema at `place`.
    pub fn schema(kind: &'static str, place: &str, text: &str, input: &str) -> Complaint {
        Complaint::Schema { kind, place: place.to_owned(), text: text.to_owned(), input: input.to_owned() }
    }

    /// A required field is absent.
    pub fn missing(place: &str, input: &str) -> Complaint {
        Complaint::schema("missing", place, "Field required", input)
    }
}
