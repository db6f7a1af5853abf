//! The endpoint table (reference gateway, section 1.4).

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
    /// `/generate`, SGLang's own API.
    Generate,
    /// `/v1/messages/count_tokens`
    MessagesCountTokens,
    /// `/v1/responses/input_tokens`
    ResponsesInputTokens,
    /// `/tokenize`
    Tokenize,
    /// `/detokenize`
    Detokenize,
    /// `/v1/score`
    Score,
    /// `/score`, the same.
    ScoreUnversioned,
    /// `/rerank`, the same as `/v1/rerank`.
    RerankUnversioned,
    /// `/v2/rerank`
    RerankV2,
    /// `/classify`, the same as `/v1/classify`.
    ClassifyUnversioned,
    /// `/pooling`
    Pooling,
    /// `/v1/audio/speech`
    AudioSpeech,
}

impl Endpoint {
    /// Every endpoint.
    pub const ALL: [Endpoint; 23] = [
        Endpoint::ChatCompletions,
        Endpoint::Messages,
        Endpoint::Completions,
        Endpoint::Responses,
        Endpoint::Embeddings,
        Endpoint::Rerank,
        Endpoint::Classify,
        Endpoint::ImagesGenerations,
        Endpoint::VideoGenerations,
        Endpoint::AudioTranscriptions,
        Endpoint::AudioTranslations,
        Endpoint::Generate,
        Endpoint::MessagesCountTokens,
        Endpoint::ResponsesInputTokens,
        Endpoint::Tokenize,
        Endpoint::Detokenize,
        Endpoint::Score,
        Endpoint::ScoreUnversioned,
        Endpoint::RerankUnversioned,
        Endpoint::RerankV2,
        Endpoint::ClassifyUnversioned,
        Endpoint::Pooling,
        Endpoint::AudioSpeech,
    ];

    /// The endpoint of a request path. The path must match exactly; a query string is ignored, and a fragment, which
    /// no HTTP client sends, matches nothing.
    pub fn from_path(path_and_query: &str) -> Option<Endpoint> {
        if path_and_query.contains('#') {
            return None;
        }
        let path = path_and_query.split_once('?').map_or(path_and_query, |(path, _)| path);
        Endpoint::ALL.into_iter().find(|endpoint| endpoint.path() == path)
    }

    /// Its path, which is also its metric label.
    pub fn path(self) -> &'static str {
        match self {
            Endpoint::ChatCompletions => "/v1/chat/completions",
            Endpoint::Messages => "/v1/messages",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Responses => "/v1/responses",
            Endpoint::Embeddings => "/v1/embeddings",
            Endpoint::Rerank => "/v1/rerank",
            Endpoint::Classify => "/v1/classify",
            Endpoint::ImagesGenerations => "/v1/images/generations",
            Endpoint::VideoGenerations => "/v1/video/generations",
            Endpoint::AudioTranscriptions => "/v1/audio/transcriptions",
            Endpoint::AudioTranslations => "/v1/audio/translations",
            Endpoint::Generate => "/generate",
            Endpoint::MessagesCountTokens => "/v1/messages/count_tokens",
            Endpoint::ResponsesInputTokens => "/v1/responses/input_tokens",
            Endpoint::Tokenize => "/tokenize",
            Endpoint::Detokenize => "/detokenize",
            Endpoint::Score => "/v1/score",
            Endpoint::ScoreUnversioned => "/score",
            Endpoint::RerankUnversioned => "/rerank",
            Endpoint::RerankV2 => "/v2/rerank",
            Endpoint::ClassifyUnversioned => "/classify",
            Endpoint::Pooling => "/pooling",
            Endpoint::AudioSpeech => "/v1/audio/speech",
        }
    }

    /// Whether it only asks what a text is in tokens, or the other way round: any pod of the model can say that, with no
    /// KV cache and no time on an accelerator.
    pub fn only_tokenizes(self) -> bool {
        matches!(
            self,
            Endpoint::MessagesCountTokens | Endpoint::ResponsesInputTokens | Endpoint::Tokenize | Endpoint::Detokenize
        )
    }

    /// Whether its bodies are multipart forms instead of JSON.
    pub fn is_multipart(self) -> bool {
        matches!(self, Endpoint::AudioTranscriptions | Endpoint::AudioTranslations)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_match_exactly_and_queries_are_ignored() {
        for endpoint in Endpoint::ALL {
            let path = endpoint.path();
            assert_eq!(Endpoint::from_path(path), Some(endpoint));
            assert_eq!(Endpoint::from_path(&format!("{path}?")), Some(endpoint));
            assert_eq!(Endpoint::from_path(&format!("{path}?api-version=1&x=/v1/rerank")), Some(endpoint));
            assert_eq!(Endpoint::from_path(&format!("{path}/")), None);
            assert_eq!(Endpoint::from_path(&format!("{path}#top")), None);
            assert_eq!(Endpoint::from_path(&format!("/{path}")), None);
            assert_eq!(Endpoint::from_path(&path.to_uppercase()), None);
        }
        for unknown in
            ["", "/", "?", "/v1/models", "/v1", "/v1/chat", "/v1/chat/completions2", "v1/completions", "generate"]
        {
            assert_eq!(Endpoint::from_path(unknown), None, "{unknown}");
        }
    }
}
