//! Which protocol a pair of pods speaks, and what the life of a request has to know of it (`engine-protocols` sections
//! 1 to 4).

use std::time::Duration;

use super::lookup::LookupKind;
use crate::fleet::Engine;
use crate::knobs::KvConnector;

/// How a prefill and a decode pod are made to work on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// vLLM, prefill first: `kv_transfer_params` travels from its answer into the decode request.
    VllmShfs,
    /// vLLM on Neuron, prefill first: its whole answer travels.
    VllmNixl,
    /// vLLM's MooncakeConnector: both at once, matched by a transfer id.
    VllmMooncake,
    /// SGLang: both at once, matched by a room.
    Sglang,
    /// TensorRT-LLM, context first: `disaggregated_params` travels from its answer into the generation request.
    TrtContextFirst,
    /// TensorRT-LLM, generation first: both at once, matched by an id.
    TrtGenerationFirst,
    /// An engine that nothing is known of: prefill first, then the client's own request to the decode pod.
    Plain,
}

/// Keys that every engine's legs set or delete. The order is that in which a duplicate is reported.
macro_rules! controlled {
    ($($own:literal),*) => {
        &["max_tokens", "max_completion_tokens", "stream", "stream_options", "min_tokens", $($own),*]
    };
}

impl Protocol {
    /// `RequestRecord::handoff` of a pair whose legs were sent at once: there was nothing to relay.
    pub const AT_ONCE: &'static str = "at_once";

    /// Every protocol.
    pub const ALL: [Protocol; 7] = [
        Protocol::VllmShfs,
        Protocol::VllmNixl,
        Protocol::VllmMooncake,
        Protocol::Sglang,
        Protocol::TrtContextFirst,
        Protocol::TrtGenerationFirst,
        Protocol::Plain,
    ];

    /// The protocol of an engine's pods, as they are configured.
    pub fn of(engine: Engine, connector: KvConnector, trt_generation_first: bool) -> Protocol {
        match (engine, connector) {
            (Engine::Vllm, KvConnector::Shfs) => Protocol::VllmShfs,
            (Engine::Vllm, KvConnector::Nixl) => Protocol::VllmNixl,
            (Engine::Vllm, KvConnector::Mooncake) => Protocol::VllmMooncake,
            (Engine::Sglang, _) => Protocol::Sglang,
            (Engine::Trtllm, _) if trt_generation_first => Protocol::TrtGenerationFirst,
            (Engine::Trtllm, _) => Protocol::TrtContextFirst,
            (Engine::Other, _) => Protocol::Plain,
        }
    }

    /// Whether both legs are sent at once. With the others, the decode leg needs the prefill leg's answer.
    pub fn is_concurrent(self) -> bool {
        matches!(self, Protocol::VllmMooncake | Protocol::Sglang | Protocol::TrtGenerationFirst)
    }

    /// Whether a request is aborted by its `rid`, with a call of its own. The others notice a closed connection.
    pub fn aborts_by_rid(self) -> bool {
        self == Protocol::Sglang
    }

    /// Top-level keys that must not occur twice in a client's body, in the order in which a duplicate is reported.
    pub fn controlled_keys(self) -> &'static [&'static str] {
        match self {
            Protocol::VllmShfs | Protocol::VllmNixl | Protocol::VllmMooncake => {
                controlled!("kv_transfer_params", "disagg_prefill_resp")
            }
            Protocol::Sglang => controlled!("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"),
            Protocol::TrtContextFirst | Protocol::TrtGenerationFirst => {
                controlled!("disaggregated_params", "prompt", "prompt_token_ids")
            }
            Protocol::Plain => controlled!(),
        }
    }

    /// Whether a prefill answer of 200 that is no JSON object is a success all the same: the KV cache has moved, and
    /// nobody needs the answer. (TensorRT-LLM's is terminal, as in the reference gateway.)
    pub fn survives_bad_response(self) -> bool {
        matches!(self, Protocol::Sglang | Protocol::VllmMooncake)
    }

    /// What has to be known of the prefill pod before either leg is sent. `mooncake_port` is the port of its bootstrap
    /// server, `rank` the data-parallel rank of the endpoint.
    pub fn needs_lookup(self, mooncake_port: u16, rank: u16) -> Option<LookupKind> {
        match self {
            Protocol::TrtGenerationFirst => Some(LookupKind::ServerInfo),
            Protocol::VllmMooncake => Some(LookupKind::MooncakeQuery { port: mooncake_port, rank }),
            _ => None,
        }
    }

    /// Whether another decode pod may take the request when the chosen one cannot be reached. Where the prefill pod was
    /// told of a decode pod, or waits for one, it may not.
    pub fn decode_failover(self) -> bool {
        matches!(self, Protocol::VllmShfs | Protocol::VllmNixl)
    }

    /// How long a prefill pod keeps KV blocks that nobody fetches, when nothing better is known: TensorRT-LLM's
    /// `kv_transfer_timeout_ms`, Mooncake's `VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`, the lease of vLLM since 0.32. Zero
    /// where they are bound to the request itself.
    pub fn default_lease(self) -> Duration {
        match self {
            Protocol::VllmShfs => Duration::from_secs(30),
            Protocol::VllmMooncake => Duration::from_mins(8),
            Protocol::TrtContextFirst | Protocol::TrtGenerationFirst => Duration::from_mins(1),
            Protocol::VllmNixl | Protocol::Sglang | Protocol::Plain => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_connectors_and_styles() {
        use KvConnector::{Mooncake, Nixl, Shfs};
        for (engine, connector, generation_first, expected) in [
            (Engine::Vllm, Shfs, true, Protocol::VllmShfs),
            (Engine::Vllm, Nixl, false, Protocol::VllmNixl),
            (Engine::Vllm, Mooncake, false, Protocol::VllmMooncake),
            (Engine::Sglang, Mooncake, true, Protocol::Sglang),
            (Engine::Trtllm, Shfs, false, Protocol::TrtContextFirst),
            (Engine::Trtllm, Nixl, true, Protocol::TrtGenerationFirst),
            (Engine::Other, Mooncake, true, Protocol::Plain),
        ] {
            assert_eq!(Protocol::of(engine, connector, generation_first), expected);
        }
    }

    #[test]
    fn properties() {
        use Protocol::{Plain, Sglang, TrtContextFirst, TrtGenerationFirst, VllmMooncake, VllmNixl, VllmShfs};
        let which = |property: fn(Protocol) -> bool| -> Vec<_> {
            Protocol::ALL.into_iter().filter(|protocol| property(*protocol)).collect()
        };
        assert_eq!(which(Protocol::is_concurrent), [VllmMooncake, Sglang, TrtGenerationFirst]);
        assert_eq!(which(Protocol::aborts_by_rid), [Sglang]);
        assert_eq!(which(Protocol::survives_bad_response), [VllmMooncake, Sglang]);
        assert_eq!(which(Protocol::decode_failover), [VllmShfs, VllmNixl]);
        assert_eq!(which(|protocol| protocol.needs_lookup(1, 0).is_some()), [VllmMooncake, TrtGenerationFirst]);
        assert_eq!(VllmMooncake.needs_lookup(9000, 2), Some(LookupKind::MooncakeQuery { port: 9000, rank: 2 }));
        let leases: Vec<_> = Protocol::ALL.map(|protocol| protocol.default_lease().as_secs()).into();
        assert_eq!(leases, [30, 0, 480, 0, 60, 60, 0]);
        assert_eq!(Plain.controlled_keys().len(), 5);
        for (protocol, last) in
            [(VllmNixl, "disagg_prefill_resp"), (Sglang, "rid"), (TrtContextFirst, "prompt_token_ids")]
        {
            assert_eq!(protocol.controlled_keys()[..5], *Plain.controlled_keys());
            assert_eq!(protocol.controlled_keys().last(), Some(&last));
        }
    }
}
