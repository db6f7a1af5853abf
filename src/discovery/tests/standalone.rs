use crate::discovery::{EndpointsError, load_endpoints, parse_endpoints};
use crate::fleet::{Engine, PodSpec, Role, Snapshot, build};

#[test]
fn endpoints_and_rolesets() {
    let text = "
models:
- name: Org/Model.1
  engine: sglang
  rolesets:
  - {name: rs0, prefill: ['10.0.0.1:8001', 'p2.local'], decode: ['[fd00::1]:9000']}
- name: plain
  endpoints: ['10.0.0.1', 'fd00::2']
";
    let specs = parse_endpoints(text).unwrap();
    let shown: Vec<(String, String, Role)> =
        specs.iter().map(|spec| (spec.key.to_string(), spec.address(), spec.role)).collect();
    let row = |key: &str, address: &str, role| (format!("standalone/{key}"), address.to_owned(), role);
    assert_eq!(
        shown,
        [
            row("org-model-1-10-0-0-1-0", "10.0.0.1:8001", Role::Prefill),
            row("org-model-1-p2-local-1", "p2.local:8000", Role::Prefill),
            row("org-model-1-fd00--1-2", "[fd00::1]:9000", Role::Decode),
            row("plain-10-0-0-1-3", "10.0.0.1:8000", Role::Other),
            row("plain-fd00--2-4", "[fd00::2]:8000", Role::Other),
        ]
    );
    assert!(specs.iter().all(|spec| spec.routable() && spec.serves_http && spec.config.is_none()));
    assert!(specs.iter().all(|spec| spec.metric_port == spec.port));
    assert_eq!((specs[0].engine, specs[3].engine), (Engine::Sglang, Engine::Vllm));
    let labels: Vec<(&str, &str)> =
        specs[0].labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(
        labels,
        [
            ("model.aibrix.ai/engine", "sglang"),
            ("model.aibrix.ai/name", "Org/Model.1"),
            ("model.aibrix.ai/port", "8001"),
            ("role-name", "prefill"),
            ("roleset-name", "rs0"),
        ]
    );
    let snapshot = build(&Snapshot::default(), &specs, &mut 0);
    let roleset = &snapshot.model("Org/Model.1").unwrap().rolesets[0];
    assert_eq!((roleset.prefill.len(), roleset.decode.len()), (2, 1));
}

#[test]
fn errors() {
    let bad_endpoint = |endpoint: &str| {
        let found = parse_endpoints(&format!("models: [{{name: m, endpoints: ['{endpoint}']}}]"));
        assert!(matches!(found, Err(EndpointsError::BadEndpoint { .. })), "{endpoint}: {found:?}");
    };
    for endpoint in
        ["h:0", "h:65536", "h:x", "h:", "", ":80", "a b:80", "[fd00::1", "[fd00::1]80", "h:1:2", "http://h:80", "[]:1"]
    {
        bad_endpoint(endpoint);
    }
    let error = |text: &str| parse_endpoints(text).unwrap_err();
    assert_eq!(error(""), EndpointsError::NoModels);
    assert_eq!(error("models: []"), EndpointsError::NoModels);
    assert_eq!(error("models: [{endpoints: ['h']}]"), EndpointsError::UnnamedModel(1));
    assert_eq!(
        error("models: [{name: m, endpoints: ['h'], rolesets: [{name: r}]}]"),
        EndpointsError::EndpointsAndRolesets("m".to_owned())
    );
    assert_eq!(error("models: [{name: m}]"), EndpointsError::NoEndpoints("m".to_owned()));
    assert_eq!(
        error("models: [{name: m, rolesets: [{prefill: ['h']}]}]"),
        EndpointsError::UnnamedRoleset("m".to_owned())
    );
    assert_eq!(
        error("models: [{name: m, endpoints: [h]}, {name: m, endpoints: [i]}]"),
        EndpointsError::DuplicateModel("m".to_owned())
    );
    assert_eq!(
        error("models: [{name: m, rolesets: [{name: r}, {name: r}]}]"),
        EndpointsError::DuplicateRoleset("m".to_owned(), "r".to_owned())
    );
    assert!(matches!(error("models: ["), EndpointsError::Syntax(_)));
    assert!(matches!(error("models: 7"), EndpointsError::Syntax(_)));
}

#[test]
fn loads_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("endpoints.yaml");
    assert!(matches!(load_endpoints(&path), Err(EndpointsError::Unreadable { .. })));
    std::fs::write(&path, "models: [{name: m, endpoints: ['h:1']}]").unwrap();
    let specs: Vec<PodSpec> = load_endpoints(&path).unwrap();
    assert_eq!(specs.len(), 1);
}
