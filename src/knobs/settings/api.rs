//! What requests are taken to be by the APIs that they use.

use super::{Group, one};

pub(super) const API: Group = Group {
    title: "APIs",
    settings: &[
        one(
            "TANDEM_NON_TEXT_PART_TOKENS",
            "1000",
            "tokens",
            "",
            "What each part of a prompt that is no text (an image, a recording, a video, a file; inline or by address) counts \
             in every estimate, in the place of its bytes. 1000 is an image of 1024 × 768 in models with one token for \
             28 × 28 pixels.",
        ),
        one(
            "TANDEM_RESPONSE_TTL_SECONDS",
            "3600",
            "seconds",
            "",
            "For how long after the last look it is known which pod has a stored response (`/v1/responses`): with Redis to \
             all replicas, else to the one that its answer went through.",
        ),
    ],
};
