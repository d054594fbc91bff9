//! Which layers an adapter covers, and the flat buffer of its parameters.

use super::{ADAPTER_CONFIG, LoraConfig, Parameters, Targets, read_config};
use crate::autograd::GradientSink;
use crate::train::Gradients;
use candle_core::{DType, Device, Tensor};
use indexmap::IndexMap;

fn paths() -> Vec<String> {
    let names = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"];
    (0..12).flat_map(|layer| names.map(|name| format!("model.layers.{layer}.{name}"))).collect()
}

fn resolve(config: &LoraConfig) -> Vec<String> {
    config.resolve(&paths(), 12).unwrap().into_iter().map(|layer| layer.path).collect()
}

fn error(config: &LoraConfig) -> String {
    config.resolve(&paths(), 12).unwrap_err().to_string()
}

#[test]
fn names_patterns_and_layers_choose_as_in_peft() {
    let config = LoraConfig::default;
    assert_eq!(resolve(&config()).len(), 36);
    let names =
        |names: &[&str]| Targets::Names(names.iter().map(|name| name.to_string()).collect());
    let by_name = LoraConfig { targets: names(&["q_proj"]), ..config() };
    assert_eq!(resolve(&by_name).len(), 12);
    // mlx-lm's keys have the parent's name too; a name matches whole parts only.
    let by_key = LoraConfig { targets: names(&["self_attn.q_proj", "down_proj"]), ..config() };
    assert_eq!(resolve(&by_key).len(), 24);
    assert!(
        error(&LoraConfig { targets: names(&["proj"]), ..config() }).contains("q_proj, v_proj")
    );
    let pattern = r"model\.layers\.(1|11)\..*q_proj";
    let by_pattern = LoraConfig { targets: Targets::Pattern(pattern.into()), ..config() };
    assert_eq!(
        resolve(&by_pattern),
        ["model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj"]
    );
    // A pattern has to match from the start to the end.
    assert!(
        error(&LoraConfig { targets: Targets::Pattern("q_proj".into()), ..config() })
            .contains("no linear layer")
    );
    assert!(
        error(&LoraConfig { targets: Targets::Pattern("(".into()), ..config() })
            .contains("regular expression")
    );
    let with_tables = |config: &LoraConfig| {
        let tables = ["model.embed_tokens", "lm_head"].map(String::from);
        config.resolve(&[paths(), tables.to_vec()].concat(), 12).unwrap().len()
    };
    assert_eq!(with_tables(&config()), 36);
    let named = LoraConfig { targets: names(&["q_proj", "lm_head", "embed_tokens"]), ..config() };
    assert_eq!(with_tables(&named), 14);
    let in_layers = LoraConfig { layers: Some(vec![0, 3]), ..named.clone() };
    assert_eq!(with_tables(&in_layers), 3);
    let whole_path = names(&["v_proj", "model.layers.5.self_attn.q_proj"]);
    let beside_layers = LoraConfig { targets: whole_path, layers: Some(vec![0, 3]), ..config() };
    assert_eq!(resolve(&beside_layers).len(), 3);
    let any = LoraConfig { targets: Targets::Pattern(".*(v_proj|lm_head)".into()), ..config() };
    assert_eq!(with_tables(&any), 13);
    let listed = LoraConfig { layers: Some(vec![1]), ..config() };
    assert_eq!(resolve(&listed).len(), 3);
    let last = LoraConfig { last_layers: Some(2), exclude: Some(names(&["v_proj"])), ..config() };
    assert_eq!(resolve(&last).len(), 4);
    assert!(resolve(&last)[0].starts_with("model.layers.10."));
    assert!(error(&LoraConfig { layers: Some(vec![12]), ..config() }).contains("0 to 11"));
}

#[test]
fn patterns_change_rank_and_scale() {
    let config = LoraConfig {
        rank: 8,
        alpha: 16.0,
        rank_pattern: IndexMap::from([("q_proj".into(), 2)]),
        alpha_pattern: IndexMap::from([(r"layers\.0\..*".into(), 4.0)]),
        ..LoraConfig::default()
    };
    let resolved = config.resolve(&paths(), 12).unwrap();
    let found: Vec<(usize, f64)> =
        resolved.iter().take(4).map(|layer| (layer.rank, layer.scale)).collect();
    assert_eq!(found, [(2, 2.0), (8, 0.5), (8, 0.5), (2, 8.0)]);
    // Of several patterns the first in the file decides.
    let ordered = LoraConfig {
        rank_pattern: IndexMap::from([("q_proj".into(), 2), (r"0\.self_attn\.q_proj".into(), 4)]),
        ..LoraConfig::default()
    };
    assert_eq!(ordered.resolve(&paths(), 12).unwrap()[0].rank, 2);
    let stabilised = LoraConfig { rank: 4, alpha: 6.0, rslora: true, ..LoraConfig::default() };
    assert_eq!(stabilised.resolve(&paths(), 12).unwrap()[0].scale, 3.0);
}

#[test]
fn values_that_cannot_work_are_refused_by_name() {
    for (name, config) in [
        ("rank", LoraConfig { rank: 0, ..LoraConfig::default() }),
        ("alpha", LoraConfig { alpha: f64::NAN, ..LoraConfig::default() }),
        ("dropout", LoraConfig { dropout: 1.0, ..LoraConfig::default() }),
        ("layers", LoraConfig { last_layers: Some(0), ..LoraConfig::default() }),
        (
            "rank_pattern",
            LoraConfig { rank_pattern: IndexMap::from([("a".into(), 0)]), ..LoraConfig::default() },
        ),
    ] {
        assert!(error(&config).contains(name), "{}", error(&config));
    }
}

#[test]
fn what_a_file_of_peft_leaves_out_has_the_defaults_of_peft() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(ADAPTER_CONFIG);
    std::fs::write(path, r#"{"peft_type": "LORA", "target_modules": ["q_proj"]}"#).unwrap();
    let (config, _) = read_config(folder.path()).unwrap();
    assert_eq!((config.rank, config.alpha), (8, 8.0));
    assert_eq!((LoraConfig::default().rank, LoraConfig::default().alpha), (16, 32.0));
}

#[test]
fn views_see_updates_and_gradients_add_up() {
    let device = Device::Cpu;
    let layout = [("bias".to_string(), 3.into()), ("matrix".to_string(), (2, 2).into())];
    let (store, ids) = Parameters::new(&layout, &device).unwrap();
    // Matrices, which weight decay applies to, come first.
    assert_eq!(store.entries()[0].name, "matrix");
    assert_eq!((store.len(), store.decayed()), (7, 4));
    let view = store.view(ids[0]).unwrap();
    store.set(ids[0], &Tensor::new(&[1_f32, 2.0, 3.0], &device).unwrap()).unwrap();
    assert_eq!(view.to_vec1::<f32>().unwrap(), [1.0, 2.0, 3.0]);
    assert_eq!(store.values().to_vec1::<f32>().unwrap(), [0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0]);
    let all = Gradients::new(&store).unwrap();
    let gradient = Tensor::new(&[[1_f32, 2.0], [3.0, 4.0]], &device).unwrap();
    (&all).accept(ids[1], gradient.t().unwrap()).unwrap();
    (&all).accept(ids[1], gradient.to_dtype(DType::BF16).unwrap()).unwrap();
    assert_eq!(all.view(ids[1]).unwrap().to_vec2::<f32>().unwrap(), [[2.0, 5.0], [5.0, 8.0]]);
    let of_bias = Tensor::new(&[1_f32, 2.0, 3.0], &device).unwrap();
    let several = vec![(ids[1], gradient.clone()), (ids[0], of_bias), (ids[1], gradient)];
    (&all).accept_all(several).unwrap();
    assert_eq!(all.buffer().to_vec1::<f32>().unwrap(), [4.0, 9.0, 11.0, 16.0, 1.0, 2.0, 3.0]);
    all.clear().unwrap();
    assert_eq!(all.buffer().to_vec1::<f32>().unwrap(), [0.0; 7]);
    let wrong = Tensor::zeros(4, DType::F32, &device).unwrap();
    assert!(store.set(ids[0], &wrong).unwrap_err().to_string().contains("bias"));
    let twice = [("a".to_string(), 1.into()), ("a".to_string(), 1.into())];
    assert!(Parameters::new(&twice, &device).is_err());
}
