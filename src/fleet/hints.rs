//! Hints by which `config-profile: auto` chooses a profile (reference section 2.3).

use std::cmp::Reverse;
use std::sync::Arc;

use super::{ModelConfig, Profile};

/// What a profile wants of its requests: every bound that is there must hold. One that needs a number which is not
/// known does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// `promptTokensGte`, tokens.
    pub prompt_gte: Option<u64>,
    /// `promptTokensLt`, tokens.
    pub prompt_lt: Option<u64>,
    /// `maxTokensGte`, tokens.
    pub max_gte: Option<u64>,
    /// `maxTokensLt`, tokens.
    pub max_lt: Option<u64>,
}

/// What hints look at in a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// cl100k_base tokens of the prompt, or any number that lies on the same side of every bound.
    pub prompt_tokens: Option<u64>,
    /// The output length that the request asks for, tokens.
    pub max_tokens: Option<u64>,
}

/// Both bounds hold; `None` = there are none.
fn within(value: Option<u64>, at_least: Option<u64>, below: Option<u64>) -> bool {
    if at_least.is_none() && below.is_none() {
        return true;
    }
    value.is_some_and(|value| at_least.is_none_or(|bound| value >= bound) && below.is_none_or(|bound| value < bound))
}

impl Hints {
    /// No hint at all: such a profile is never chosen by its hints.
    pub fn is_empty(&self) -> bool {
        *self == Hints::default()
    }

    /// The bounds leave nobody over.
    pub fn exclude_everybody(&self) -> bool {
        let empty = |at_least: Option<u64>, below: Option<u64>| below.is_some_and(|b| at_least.unwrap_or(0) >= b);
        empty(self.prompt_gte, self.prompt_lt) || empty(self.max_gte, self.max_lt)
    }

    fn suit_output(&self, max_tokens: Option<u64>) -> bool {
        within(max_tokens, self.max_gte, self.max_lt)
    }

    fn suit(&self, features: Features) -> bool {
        !self.is_empty()
            && self.suit_output(features.max_tokens)
            && within(features.prompt_tokens, self.prompt_gte, self.prompt_lt)
    }

    /// Ascending: the more specific first. A bound that is not there is as weak as one can be.
    fn rank(&self) -> impl Ord {
        let bounds = [self.prompt_gte, self.prompt_lt, self.max_gte, self.max_lt];
        (
            Reverse(bounds.into_iter().flatten().count()),
            Reverse(self.prompt_gte.unwrap_or(0)),
            self.prompt_lt.unwrap_or(u64::MAX),
            Reverse(self.max_gte.unwrap_or(0)),
            self.max_lt.unwrap_or(u64::MAX),
        )
    }
}

impl ModelConfig {
    /// The profile of a request that asks for `auto`: the most specific one whose hints all hold (more hints, then the
    /// higher `promptTokensGte`, the lower `promptTokensLt`, the higher `maxTokensGte`, the lower `maxTokensLt`, the
    /// name that comes first), else the default profile, if there is one.
    pub fn by_hints(&self, features: Features) -> Option<&Arc<Profile>> {
        // The profiles come ordered by name, and the first of several least ones wins.
        self.profiles
            .values()
            .filter(|profile| profile.hints.suit(features))
            .min_by_key(|profile| profile.hints.rank())
            .or_else(|| self.profile(None))
    }

    /// The largest bound on the prompt that can matter to a request with this output length: whoever counts so far
    /// knows all that hints can ask. `None`: no hint looks at the prompt.
    pub fn largest_prompt_hint(&self, max_tokens: Option<u64>) -> Option<u64> {
        self.profiles
            .values()
            .filter(|profile| profile.hints.suit_output(max_tokens))
            .flat_map(|profile| [profile.hints.prompt_gte, profile.hints.prompt_lt])
            .flatten()
            .max()
    }
}
