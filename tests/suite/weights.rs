//! Checkpoints: every layout gives the same tensors, and a faulty one an error that names the tensor and the file.

use crate::common::fixture::{fixture_checkpoint, fixture_weights, save, FIXTURES};
use crate::common::{message_in, trained_model};
use candle::{DType, Device, Result, Tensor};
use gem::models::gemma4::Weights;
use half::{bf16, f16};
use insta::assert_snapshot;
use std::collections::HashMap;
use std::path::Path;

type Tensors = HashMap<String, Tensor>;

/// Two tensors under a prefix: enough of a model for an error text.
fn small(prefix: &str) -> Tensors {
    let tensor = |from: f32, shape: &[usize]| {
        let values = Tensor::arange(from, from + 8.0, &Device::Cpu)?;
        values.reshape(shape)?.to_dtype(DType::BF16)
    };
    HashMap::from([
        (
            format!("{prefix}embed_tokens.weight"),
            tensor(0.0, &[4, 2]).unwrap(),
        ),
        (format!("{prefix}norm.weight"), tensor(-3.0, &[8]).unwrap()),
    ])
}

/// What `small` holds.
fn small_shapes() -> Vec<(String, Vec<usize>)> {
    vec![
        ("embed_tokens.weight".into(), vec![4, 2]),
        ("norm.weight".into(), vec![8]),
    ]
}

fn write_index(dir: &Path, weight_map: &[(&str, &str)]) {
    let weight_map: HashMap<_, _> = weight_map.iter().copied().collect();
    let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": weight_map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Writes `tensors` into two shards with an index, names dealt out in turn.
fn save_sharded(tensors: &Tensors, dir: &Path) {
    let mut names: Vec<&str> = tensors.keys().map(String::as_str).collect();
    names.sort();
    let mut shards = [Tensors::new(), Tensors::new()];
    let mut weight_map = Vec::new();
    for (i, name) in names.into_iter().enumerate() {
        let file = ["a.safetensors", "b.safetensors"][i % 2];
        shards[i % 2].insert(name.to_string(), tensors[name].clone());
        weight_map.push((name, file));
    }
    save(&shards[0], &dir.join("a.safetensors"));
    save(&shards[1], &dir.join("b.safetensors"));
    write_index(dir, &weight_map);
}

/// A checkpoint of one tensor, `model.norm.weight`.
fn save_norm(tensor: Tensor) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let tensors = HashMap::from([("model.norm.weight".to_string(), tensor)]);
    save(&tensors, &dir.path().join("model.safetensors"));
    dir
}

fn load_norm(dir: &Path, dtype: DType) -> Result<Tensor> {
    let builder = Weights::open_dir(dir)?.var_builder(dtype, &Device::Cpu);
    builder.get_unchecked("norm.weight")
}

fn bits(tensor: &Tensor) -> Result<Vec<u16>> {
    let values = tensor.flatten_all()?.to_vec1::<bf16>()?;
    Ok(values.into_iter().map(bf16::to_bits).collect())
}

/// The error of a result that must be one.
fn refused<T>(result: Result<T>, dir: &Path) -> String {
    match result {
        Ok(_) => panic!("accepted"),
        Err(error) => message_in(dir, error),
    }
}

/// The error of opening a folder with one file of these bytes.
fn refused_bytes(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    refused(Weights::open_dir(dir.path()), dir.path())
}

/// The error of `check` on a checkpoint of one file.
fn refused_check(tensors: &Tensors, expected: &[(String, Vec<usize>)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    save(tensors, &dir.path().join("model.safetensors"));
    let weights = Weights::open_dir(dir.path()).unwrap();
    refused(weights.check(expected), dir.path())
}

fn safetensors_bytes(header: &str, data: &[u8]) -> Vec<u8> {
    let len = (header.len() as u64).to_le_bytes();
    [&len, header.as_bytes(), data].concat()
}

/// huggingface/candle#3967: the published names have another prefix than the loader looked for.
#[test]
fn every_layout_gives_the_same_tensors() -> Result<()> {
    for name in FIXTURES {
        let published = name == "tiny-gemma4-d512";
        let prefix = ["model.", "model.language_model."][usize::from(published)];
        let tensors: Tensors = fixture_weights(name)
            .into_iter()
            .map(|(name, tensor)| (name.strip_prefix(prefix).unwrap().to_string(), tensor))
            .collect();
        let shapes: Vec<_> = tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor.dims().to_vec()))
            .collect();
        for prefix in ["model.", "model.language_model."] {
            for (others, sharded) in [(false, false), (true, false), (true, true)] {
                let mut all: Tensors = tensors
                    .iter()
                    .map(|(name, tensor)| (format!("{prefix}{name}"), tensor.clone()))
                    .collect();
                if others {
                    for part in ["vision_tower.patch.weight", "embed_vision.proj.weight"] {
                        let name = format!("model.{part}");
                        all.insert(name, Tensor::zeros(3, DType::U8, &Device::Cpu)?);
                    }
                }
                let dir = tempfile::tempdir().unwrap();
                match sharded {
                    true => save_sharded(&all, dir.path()),
                    false => save(&all, &dir.path().join("model.safetensors")),
                }
                let weights = Weights::open_dir(dir.path())?;
                weights.check(&shapes)?;
                let elements: usize = shapes
                    .iter()
                    .map(|(_, s)| s.iter().product::<usize>())
                    .sum();
                assert_eq!(weights.bytes_on_disk(), 2 * elements);
                let builder = weights.var_builder(DType::BF16, &Device::Cpu);
                for (name, want) in &tensors {
                    let got = builder.get(want.shape(), name)?;
                    assert_eq!(bits(&got)?, bits(want)?, "{name}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn named_files_need_no_index_and_no_folder() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    save_sharded(&small("model."), dir.path());
    let files = ["a.safetensors", "b.safetensors"].map(|file| dir.path().join(file));
    Weights::open(&files)?.check(&small_shapes())?;
    Weights::open_dir(trained_model())?;
    Ok(())
}

#[test]
fn values_that_every_dtype_holds_survive_every_conversion() -> Result<()> {
    let exact = [0.0f32, -0.0, 0.5, -1.75, 96.0, 6.103_515_6e-5];
    let dtypes = [DType::BF16, DType::F16, DType::F32];
    for stored in dtypes {
        let dir = save_norm(Tensor::new(&exact, &Device::Cpu)?.to_dtype(stored)?);
        Weights::open_dir(dir.path())?.check(&[("norm.weight".into(), vec![6])])?;
        for wanted in dtypes {
            let got = load_norm(dir.path(), wanted)?;
            assert_eq!(got.dtype(), wanted);
            let got = got.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            let bits =
                |values: &[f32]| -> Vec<u32> { values.iter().map(|v| v.to_bits()).collect() };
            assert_eq!(bits(&got), bits(&exact), "{stored:?} to {wanted:?}");
        }
    }
    Ok(())
}

#[test]
fn a_narrower_dtype_rounds_to_nearest_even() -> Result<()> {
    let values = [1.0f32 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 0.1, -1.0e-6];
    let dir = save_norm(Tensor::new(&values, &Device::Cpu)?);
    let got = load_norm(dir.path(), DType::BF16)?.to_vec1::<bf16>()?;
    assert_eq!(got, values.map(bf16::from_f32));
    let got = load_norm(dir.path(), DType::F16)?.to_vec1::<f16>()?;
    assert_eq!(got, values.map(f16::from_f32));
    Ok(())
}

#[test]
fn a_value_beyond_f16_is_refused_and_not_made_infinite() -> Result<()> {
    let dir = save_norm(Tensor::new(&[1.0f32, -1.0e5], &Device::Cpu)?.to_dtype(DType::BF16)?);
    load_norm(dir.path(), DType::F32)?;
    assert_snapshot!(refused(load_norm(dir.path(), DType::F16), dir.path()), @"weights: model.norm.weight in [dir]/model.safetensors: holds a value too large for F16, use BF16 or F32");
    Ok(())
}

#[test]
fn a_folder_without_a_checkpoint_says_what_was_looked_for() {
    let dir = tempfile::tempdir().unwrap();
    assert_snapshot!(refused(Weights::open_dir(dir.path()), dir.path()), @"weights: found no checkpoint, looked for [dir]/model.safetensors.index.json and [dir]/model.safetensors");
    assert_snapshot!(refused(Weights::open(&[""; 0]), dir.path()), @"weights: no file given");
    let missing = refused(
        Weights::open(&[dir.path().join("x.safetensors")]),
        dir.path(),
    );
    assert!(
        missing.starts_with("weights: [dir]/x.safetensors: "),
        "{missing}"
    );
}

#[test]
fn a_truncated_file_names_the_first_tensor_that_is_cut() {
    let dir = fixture_checkpoint("tiny-gemma4-d64");
    let whole = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    assert_snapshot!(refused_bytes(&whole[..whole.len() - 1]), @"weights: [dir]/model.safetensors: truncated, model.norm.weight ends at byte 3301272, the data at 3301271");
    assert_snapshot!(refused_bytes(&whole[..whole.len() / 2]), @"weights: [dir]/model.safetensors: truncated, model.layers.3.self_attn.v_proj.weight ends at byte 1666956, the data at 1641760");
    assert_snapshot!(refused_bytes(&whole[..1000]), @"weights: [dir]/model.safetensors: truncated, its header should have 17744 bytes, has 992");
    assert_snapshot!(refused_bytes(&whole[..5]), @"weights: [dir]/model.safetensors: truncated, has 5 bytes in all");
    assert_snapshot!(refused_bytes(b""), @"weights: [dir]/model.safetensors: truncated, has 0 bytes in all");
    assert_snapshot!(refused_bytes(&[&whole[..], b"xyz"].concat()), @"weights: [dir]/model.safetensors: 3 bytes follow the last tensor");
}

#[test]
fn a_header_that_lies_is_refused_by_name() {
    let lie = |info: &str| {
        let header = format!(r#"{{"model.norm.weight":{info}}}"#);
        refused_bytes(&safetensors_bytes(&header, &[0; 16]))
    };
    let shape = r#"{"dtype":"BF16","shape":[9],"data_offsets":[0,16]}"#;
    assert_snapshot!(lie(shape), @"weights: [dir]/model.safetensors: model.norm.weight: BF16 [9] does not fill bytes 0 to 16");
    let dtype = r#"{"dtype":"Q4_K","shape":[8],"data_offsets":[0,16]}"#;
    assert_snapshot!(lie(dtype), @"weights: [dir]/model.safetensors: model.norm.weight: unknown variant `Q4_K`, expected one of `BOOL`, `F4`, `F6_E2M3`, `F6_E3M2`, `U8`, `I8`, `F8_E5M2`, `F8_E4M3`, `F8_E8M0`, `F8_E4M3FNUZ`, `F8_E5M2FNUZ`, `I16`, `U16`, `F16`, `BF16`, `I32`, `U32`, `F32`, `C64`, `F64`, `I64`, `U64` at line 1 column 36");
    let offset = r#"{"dtype":"BF16","shape":[4],"data_offsets":[8,16]}"#;
    assert_snapshot!(lie(offset), @"weights: [dir]/model.safetensors: model.norm.weight: starts at byte 8, want 0");
    let overflow = r#"{"dtype":"BF16","shape":[9223372036854775810,2],"data_offsets":[0,8]}"#;
    assert_snapshot!(lie(overflow), @"weights: [dir]/model.safetensors: model.norm.weight: BF16 [9223372036854775810, 2] does not fill bytes 0 to 8");
    let backwards = r#"{"dtype":"BF16","shape":[4],"data_offsets":[0,-8]}"#;
    assert_snapshot!(lie(backwards), @"weights: [dir]/model.safetensors: model.norm.weight: invalid value: integer `-8`, expected usize at line 1 column 69");
    assert_snapshot!(refused_bytes(&safetensors_bytes("{]", &[])), @"weights: [dir]/model.safetensors: its header is not JSON: key must be a string at line 1 column 2");
    assert_snapshot!(refused_bytes(b"GGUF\x03\0\0\0 and then anything"), @"weights: [dir]/model.safetensors: no safetensors file, its header should have 14064895815 bytes, want at most 16777216");
}

/// The safetensors crate takes the last, and serde_json the last file that an index gives.
#[test]
fn a_name_that_is_there_twice_is_refused() {
    let norm = r#""model.norm.weight":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}"#;
    let header = format!("{{{norm},{norm}}}");
    assert_snapshot!(refused_bytes(&safetensors_bytes(&header, &[0; 8])), @r#"weights: [dir]/model.safetensors: "model.norm.weight" is there twice at line 1 column 90"#);
    let metadata = r#""__metadata__":{}"#;
    let header = format!("{{{metadata},{norm},{metadata}}}");
    assert_snapshot!(refused_bytes(&safetensors_bytes(&header, &[0; 8])), @r#"weights: [dir]/model.safetensors: "__metadata__" is there twice at line 1 column 103"#);
    let dir = tempfile::tempdir().unwrap();
    let norm = r#""model.norm.weight":"a.safetensors""#;
    for index in [
        format!(r#"{{"weight_map":{{{norm},{norm}}}}}"#),
        format!(r#"{{"weight_map":{{{norm}}},"weight_map":{{{norm}}}}}"#),
    ] {
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let text = refused(Weights::open_dir(dir.path()), dir.path());
        assert!(
            text.contains("is there twice") || text.contains("duplicate field `weight_map`"),
            "{text}"
        );
    }
}

#[test]
fn a_name_in_two_files_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let files = ["a.safetensors", "b.safetensors"].map(|file| dir.path().join(file));
    for file in &files {
        save(&small("model."), file);
    }
    assert_snapshot!(refused(Weights::open(&files), dir.path()), @"weights: model.embed_tokens.weight is in two files, [dir]/a.safetensors and [dir]/b.safetensors");
}

#[test]
fn names_of_no_known_part_are_refused() {
    let refused_with = |mut tensors: Tensors, name: &str| {
        tensors.insert(
            name.into(),
            Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap(),
        );
        let dir = tempfile::tempdir().unwrap();
        save(&tensors, &dir.path().join("model.safetensors"));
        refused(Weights::open_dir(dir.path()), dir.path())
    };
    let published = small("model.language_model.");
    assert_snapshot!(refused_with(published.clone(), "model.norm.weight"), @"weights: model.norm.weight in [dir]/model.safetensors: belongs to no known part");
    assert_snapshot!(refused_with(published, "language_model.norm.weight"), @"weights: language_model.norm.weight in [dir]/model.safetensors: belongs to no known part");
    assert_snapshot!(refused_with(Tensors::new(), "transformer.wte.weight"), @"weights: no tensor of [dir]/model.safetensors starts with model.language_model. or model.");
}

#[test]
fn check_reports_all_faults_at_once() {
    let mut tensors = small("model.language_model.");
    let wrong = Tensor::zeros((8, 1), DType::U32, &Device::Cpu).unwrap();
    tensors.insert("model.language_model.norm.weight".into(), wrong.clone());
    tensors.insert("model.language_model.layers.0.layer_scalar".into(), wrong);
    let mut expected = small_shapes();
    expected.push(("layers.0.self_attn.v_proj.weight".into(), vec![4, 2]));
    assert_snapshot!(refused_check(&tensors, &expected), @"
    weights: 3 faults
      model.language_model.norm.weight in [dir]/model.safetensors: has shape [8, 1], want [8]
      model.language_model.layers.0.self_attn.v_proj.weight: missing from [dir]/model.safetensors
      model.language_model.layers.0.layer_scalar in [dir]/model.safetensors: not a tensor of this model
    ");
}

#[test]
fn check_refuses_integer_weights() {
    let mut tensors = small("model.");
    let quantised = Tensor::zeros(8, DType::U8, &Device::Cpu).unwrap();
    tensors.insert("model.norm.weight".into(), quantised);
    assert_snapshot!(refused_check(&tensors, &small_shapes()), @"weights: model.norm.weight in [dir]/model.safetensors: is stored as U8, want BF16, F16 or F32");
}

#[test]
fn check_lists_eight_faults_and_counts_the_rest() {
    let expected: Vec<_> = (0..30)
        .map(|i| (format!("layers.{i}.layer_scalar"), vec![1]))
        .chain(small_shapes())
        .collect();
    assert_snapshot!(refused_check(&small("model."), &expected), @"
    weights: 30 faults
      model.layers.0.layer_scalar: missing from [dir]/model.safetensors
      model.layers.1.layer_scalar: missing from [dir]/model.safetensors
      model.layers.2.layer_scalar: missing from [dir]/model.safetensors
      model.layers.3.layer_scalar: missing from [dir]/model.safetensors
      model.layers.4.layer_scalar: missing from [dir]/model.safetensors
      model.layers.5.layer_scalar: missing from [dir]/model.safetensors
      model.layers.6.layer_scalar: missing from [dir]/model.safetensors
      model.layers.7.layer_scalar: missing from [dir]/model.safetensors
      and 22 more
    ");
}

#[test]
fn a_head_must_be_the_embedding_byte_for_byte() -> Result<()> {
    let mut tensors = small("model.");
    let dir = tempfile::tempdir().unwrap();
    let embedding = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".into(), embedding.clone());
    save(&tensors, &dir.path().join("model.safetensors"));
    Weights::open_dir(dir.path())?.check(&small_shapes())?;

    let others = [
        embedding.affine(1.0, 1.0)?,
        embedding.t()?.contiguous()?,
        embedding.to_dtype(DType::F16)?,
    ];
    let [values, shape, dtype] = others.map(|other| {
        tensors.insert("lm_head.weight".into(), other);
        refused_check(&tensors, &small_shapes())
    });
    assert_snapshot!(values, @"weights: lm_head.weight in [dir]/model.safetensors is not model.embed_tokens.weight in [dir]/model.safetensors, but the head of this model is tied to it");
    assert_eq!([&shape, &dtype], [&values, &values]);
    Ok(())
}

#[test]
fn the_builder_names_tensor_and_file() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    save(&small("model."), &dir.path().join("model.safetensors"));
    let builder = Weights::open_dir(dir.path())?.var_builder(DType::F32, &Device::Cpu);
    assert!(builder.contains_tensor("norm.weight") && !builder.contains_tensor("bias"));
    assert_snapshot!(refused(builder.get(8, "bias"), dir.path()), @"weights: model.bias: missing from [dir]/model.safetensors");
    assert_snapshot!(refused(builder.get(9, "norm.weight"), dir.path()), @"weights: model.norm.weight in [dir]/model.safetensors: has shape [8], want [9]");
    Ok(())
}

#[test]
fn an_index_may_not_lead_out_of_its_folder() {
    for file in [
        "../a.safetensors",
        "/a.safetensors",
        "sub/a.safetensors",
        "..",
        ".",
        "",
        "c:a",
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        save(&small("model."), &dir.path().join("sub/a.safetensors"));
        write_index(dir.path(), &[("model.norm.weight", file)]);
        let text = refused(Weights::open_dir(dir.path()), dir.path());
        let fault = "[dir]/model.safetensors.index.json: puts model.norm.weight into";
        let want = "want the name of a file beside the index";
        assert_eq!(text, format!("weights: {fault} {file:?}, {want}"));
    }
}

#[test]
fn an_index_and_its_shards_must_agree_on_every_tensor() {
    let refused_index = |weight_map: &[(&str, &str)]| {
        let dir = tempfile::tempdir().unwrap();
        save_sharded(&small("model."), dir.path());
        write_index(dir.path(), weight_map);
        refused(Weights::open_dir(dir.path()), dir.path())
    };
    let (embed, norm) = ("model.embed_tokens.weight", "model.norm.weight");
    let (a, b) = ("a.safetensors", "b.safetensors");
    assert_snapshot!(refused_index(&[(embed, b), (norm, a)]), @"
    weights: 4 faults
      model.embed_tokens.weight: not in [dir]/b.safetensors, where model.safetensors.index.json puts it
      model.norm.weight: not in [dir]/a.safetensors, where model.safetensors.index.json puts it
      model.embed_tokens.weight: in [dir]/a.safetensors, where model.safetensors.index.json does not put it
      model.norm.weight: in [dir]/b.safetensors, where model.safetensors.index.json does not put it
    ");
    assert_snapshot!(refused_index(&[(embed, a), (norm, b), ("model.x", b)]), @"weights: model.x: not in [dir]/b.safetensors, where model.safetensors.index.json puts it");
    assert_snapshot!(refused_index(&[(embed, a), (norm, "c.safetensors")]), @"weights: [dir]/model.safetensors.index.json: puts model.norm.weight into c.safetensors, which is not beside the index");
    assert_snapshot!(refused_index(&[]), @"weights: [dir]/model.safetensors.index.json: weight_map lists no tensor");
}

#[test]
fn a_shard_of_vision_alone_may_be_missing_and_any_shard_must_be_listed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    save_sharded(&small("model."), dir.path());
    let map = [
        ("model.embed_tokens.weight", "a.safetensors"),
        ("model.norm.weight", "b.safetensors"),
        ("model.vision_tower.x", "model-00003-of-00003.safetensors"),
    ];
    write_index(dir.path(), &map);
    Weights::open_dir(dir.path())?.check(&small_shapes())?;
    write_index(dir.path(), &map[..2]);
    save(
        &small("other."),
        &dir.path().join("consolidated.safetensors"),
    );
    Weights::open_dir(dir.path())?.check(&small_shapes())?;
    save(
        &small("model.vision_tower."),
        &dir.path().join("model-00003-of-00003.safetensors"),
    );
    assert_snapshot!(refused(Weights::open_dir(dir.path()), dir.path()), @"weights: [dir]/model-00003-of-00003.safetensors: a shard beside model.safetensors.index.json, which does not list it");
    Ok(())
}

#[test]
fn a_tensor_that_the_index_does_not_list_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    save(&small("model."), &dir.path().join("a.safetensors"));
    write_index(dir.path(), &[("model.norm.weight", "a.safetensors")]);
    assert_snapshot!(refused(Weights::open_dir(dir.path()), dir.path()), @"weights: model.embed_tokens.weight: in [dir]/a.safetensors, where model.safetensors.index.json does not put it");
    std::fs::write(dir.path().join("model.safetensors.index.json"), "[]").unwrap();
    assert_snapshot!(refused(Weights::open_dir(dir.path()), dir.path()), @"weights: [dir]/model.safetensors.index.json: invalid length 0, expected struct Index with 1 element at line 1 column 2");
}

#[test]
fn a_truncated_shard_names_the_shard() {
    let dir = tempfile::tempdir().unwrap();
    save_sharded(&small("model."), dir.path());
    let shard = dir.path().join("b.safetensors");
    let whole = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &whole[..whole.len() - 4]).unwrap();
    assert_snapshot!(refused(Weights::open_dir(dir.path()), dir.path()), @"weights: [dir]/b.safetensors: truncated, model.norm.weight ends at byte 16, the data at 12");
}
