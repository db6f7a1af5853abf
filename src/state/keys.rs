//! The text of every key in Redis.
//!
//! All keys of a model share one Cluster hash tag, so that a script stays on one node, and each model has its own, so that
//! models spread over the nodes; so do those of a user. The number in a key is that of the layout behind it: replicas with another layout use
//! other keys, rather than misread these.

use std::fmt::Write as _;

/// Layout of the values behind the ledger's keys.
const LEDGER_LAYOUT: u32 = 1;

/// Length above which a model's name is cut in keys; a hash keeps such names apart.
const MAX_TAG: usize = 96;

/// The keys of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelKeys {
    tag: String,
    /// Control, leases, pods, changes and channel, in the order that the ledger's scripts want.
    ledger: [String; 5],
}

impl ModelKeys {
    /// The keys of `model`.
    pub fn new(model: &str) -> ModelKeys {
        let tag = tag(model);
        let ledger = ["control", "leases", "pods", "changes", "news"]
            .map(|part| format!("tandem:{{{tag}}}:ledger{LEDGER_LAYOUT}:{part}"));
        ModelKeys { tag, ledger }
    }

    /// KEYS of `ledger_sync.lua`, `ledger_reap.lua` and `claim.lua`.
    pub fn ledger(&self) -> [&str; 5] {
        self.ledger.each_ref().map(String::as_str)
    }

    /// The channel on which the ledger's changes are announced; the last of [`ModelKeys::ledger`].
    pub fn news(&self) -> &str {
        let [.., news] = &self.ledger;
        news
    }

    /// KEYS of `sketch_sync.lua`: the stream of one sketch's batches, and what each replica has sent last.
    pub fn sketch(&self, name: &str) -> [String; 2] {
        ["batches", "seen"].map(|part| format!("tandem:{{{}}}:sketch1:{name}:{part}", self.tag))
    }

    /// KEYS of `prefix_append.lua`.
    pub fn prefix(&self) -> String {
        format!("tandem:{{{}}}:prefix1", self.tag)
    }

    /// KEYS of `rate.lua`: one limit on the model, such as its requests per second.
    pub fn rate(&self, limit: &str) -> String {
        format!("tandem:{{{}}}:rate1:{limit}", self.tag)
    }
}

/// KEYS of `census.lua`.
pub const CENSUS: &str = "tandem:census1";

/// KEYS of `identity.lua`: until when replicas keep their numbers, the numbers, the seed.
pub const IDENTITY: [&str; 3] =
    ["tandem:{replicas}:identity1:until", "tandem:{replicas}:identity1:numbers", "tandem:{replicas}:identity1:seed"];

/// Where a stored response is. Of no model: who asks knows only its id.
pub fn response(id: &str) -> String {
    format!("tandem:response1:{}", tag(id))
}

/// The record of a user, where the reference gateway keeps it (its section 8.4).
pub fn user_record(name: &str) -> String {
    format!("aibrix-users/{name}")
}

/// The limits of one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserKeys {
    limits: [String; 2],
}

impl UserKeys {
    /// The keys of the user called `name`.
    pub fn new(name: &str) -> UserKeys {
        let tag = tag(name);
        UserKeys { limits: ["rpm", "tpm"].map(|limit| format!("tandem:{{user:{tag}}}:rate1:{limit}")) }
    }

    /// KEYS of `rate.lua`: requests, then tokens, per minute.
    pub fn limits(&self) -> [&str; 2] {
        self.limits.each_ref().map(String::as_str)
    }

    /// The latter alone.
    pub fn tokens(&self) -> &str {
        let [_, tokens] = &self.limits;
        tokens
    }
}

/// A hash tag may hold anything but braces, and logs should be able to show it.
fn tag(model: &str) -> String {
    let mut tag = String::new();
    for byte in model.bytes() {
        if tag.len() >= MAX_TAG {
            let _ = write!(tag, "~{:016x}", xxhash_rust::xxh64::xxh64(model.as_bytes(), 0));
            break;
        }
        if byte.is_ascii_alphanumeric() || b"-._/:".contains(&byte) {
            tag.push(char::from(byte));
        } else {
            let _ = write!(tag, "%{byte:02x}");
        }
    }
    // An empty tag is no tag: the whole key would be hashed.
    if tag.is_empty() { "%".to_owned() } else { tag }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Redis Cluster hashes of a key.
    fn hashed(key: &str) -> &str {
        let Some(open) = key.find('{') else { return key };
        match key[open + 1..].find('}') {
            Some(0) | None => key,
            Some(length) => &key[open + 1..open + 1 + length],
        }
    }

    #[test]
    fn r68_all_keys_of_a_model_share_a_slot_and_models_do_not() {
        let mut tags = std::collections::BTreeSet::new();
        let long = "m".repeat(5_000);
        let models = ["llama", "", "a}b", "{", "{}", "org/model:7b", "ü", "a b\r\n", long.as_str(), &long[1..]];
        for model in models {
            let keys = ModelKeys::new(model);
            let mut all: Vec<String> = keys.ledger().map(str::to_owned).to_vec();
            all.extend(keys.sketch("arrivals"));
            all.extend([keys.prefix(), keys.rate("rps")]);
            for key in &all {
                assert_eq!(hashed(key), keys.tag, "{key}");
                assert!(key.len() < 300 && key.bytes().all(|byte| byte.is_ascii_graphic()), "{key}");
            }
            all.sort();
            all.dedup();
            assert_eq!(all.len(), 9);
            tags.insert(keys.tag);
        }
        assert_eq!(tags.len(), models.len());
    }

    #[test]
    fn the_limits_of_a_user_share_a_slot_and_no_model_has_it() {
        let long = "u".repeat(5_000);
        for name in ["alice", "", "a}b", "{", "ü", "user:alice", long.as_str()] {
            let keys = UserKeys::new(name);
            let [requests, tokens] = keys.limits();
            assert_eq!(hashed(requests), hashed(tokens), "{name}");
            assert!(requests != tokens && tokens == keys.tokens());
            // A model may be called like a user: then they share a slot, but no key.
            let model = ModelKeys::new(&format!("user:{name}"));
            assert!(!keys.limits().contains(&model.rate("rps").as_str()), "{name}");
            assert!(requests.len() < 300 && requests.bytes().all(|byte| byte.is_ascii_graphic()), "{requests}");
        }
        assert_ne!(UserKeys::new("a"), UserKeys::new("A"));
    }

    #[test]
    fn keys_stay_as_they_are() {
        let keys = ModelKeys::new("org/llama 3");
        assert_eq!(keys.news(), "tandem:{org/llama%203}:ledger1:news");
        assert_eq!(keys.ledger()[0], "tandem:{org/llama%203}:ledger1:control");
        assert_eq!(keys.rate("rps"), "tandem:{org/llama%203}:rate1:rps");
        assert_eq!(UserKeys::new("a b").tokens(), "tandem:{user:a%20b}:rate1:tpm");
        assert_eq!(user_record("a b"), "aibrix-users/a b");
        assert_eq!(response("resp_1"), "tandem:response1:resp_1");
        assert!(response(&"r".repeat(5_000)).len() < 300);
    }
}
