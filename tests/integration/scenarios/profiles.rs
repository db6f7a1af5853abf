//! Profiles as clients see them: the choice by size, its answer header, and limits.

use serde_json::json;

use super::{Pair, ask, chat, settle};
use crate::harness::engines::MODEL;
use crate::harness::fleet::{Fleet, FleetOptions};

/// `auto` goes by the size of the request, over both ways in, and says what it chose; a limit is an OpenAI error.
#[tokio::test(flavor = "multi_thread")]
async fn auto_chooses_by_size_and_a_limit_is_a_429() {
    let pair = Pair::start(0, MODEL, |config| config).await;
    let config = json!({"profiles": {
        "default": {"routingStrategy": "pd"},
        "long": {"routingStrategy": "pd", "routingConfig": {"promptTokensGte": 5000}},
        "essay": {"routingStrategy": "least-request", "routingConfig": {"promptTokensLt": 5000, "maxTokensGte": 64}},
        "slow": {"routingStrategy": "pd", "requestsPerSecond": 1},
    }});
    let fleet = Fleet::start(pair.pods(&config), FleetOptions { replicas: 1, ..FleetOptions::default() }).await;
    for path in fleet.paths() {
        for (words, max_tokens, chosen, strategy) in
            [(5, 2, "default", "pd"), (5, 64, "essay", "least-request"), (12_000, 2, "long", "pd")]
        {
            let question = chat(MODEL, &"word ".repeat(words), max_tokens, false);
            let answer = ask(&path, question).header("config-profile", "AUTO").send().await;
            assert_eq!(answer.status, 200, "{words} words");
            assert_eq!(answer.header("x-aibrix-config-profile"), chosen, "{words} words");
            assert_eq!(answer.header("routing-strategy"), strategy, "{words} words");
            assert!(answer.body().await.complete);
        }
        // One a second: these cannot all pass unless they take a quarter of a minute.
        let mut refused = 0;
        for _ in 0..15 {
            let answer = ask(&path, chat(MODEL, "again", 1, false)).header("config-profile", "slow").send().await;
            assert_eq!(answer.header("x-aibrix-config-profile"), "", "it was asked for by name");
            if answer.status == 429 {
                refused += 1;
                assert_eq!(answer.header("x-error-model-rps-exceeded"), "true");
                let error = answer.json().await;
                assert_eq!(error["error"]["code"], "rate_limit_exceeded");
                assert_eq!(error["error"]["type"], "rate_limit_error");
            } else {
                assert_eq!(answer.status, 200);
                assert!(answer.body().await.complete);
            }
        }
        assert!(refused > 0);
    }
    settle(&fleet.tandems, &pair.engines()).await;
}
