//! The endpoint table (reference section 1.4).

/// A path that the gateway serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/messages`
    Messages,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v1/rerank`
    Rerank,
    /// `/v1/classify`
    Classify,
    /// `/v1/images/generations`
    ImagesGenerations,
    /// `/v1/video/generations`
    VideoGenerations,
    /// `/v1/audio/transcriptions`
    AudioTranscriptions,
    /// `/v1/audio/translations`
    AudioTranslations,
}

impl Endpoint {
    /// The endpoint of a request path; a query string is ignored.
    pub fn from_path(_path_and_query: &str) -> Option<Endpoint> {
        None
    }

    /// Its path, which is also its metric label.
    pub fn path(self) -> &'static str {
        ""
    }
}
