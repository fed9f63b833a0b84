//! The table: what each GGUF tensor of the qwen35, qwen35moe and qwen4exp architectures is in the source checkpoint, and
//! what llama.cpp's converter did to it. Checked against that converter's own output and the checkpoint it came from.

use super::Architecture;

/// Where a rule applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// A tensor of the model, by its whole name; the source name stands under the prefix of the language model.
    Model,
    /// As `Model`, but the source name stands alone.
    Root,
    /// `blk.N.` + name: a layer of the model (`layers.N.` under the prefix), or the drafter's one (`mtp.layers.0.`).
    Block,
    /// `blk.N.` + name in the drafter's block; the source name stands under `mtp.`.
    Drafter,
    /// The n-gram table; the source name stands under the model's PLE layer.
    Table,
}

/// What was done to each value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// Nothing.
    Same,
    /// 1 + w is stored, for a norm weight w of BF16. The difference is w for |w| >= 2^-16; of smaller weights the
    /// converter's addition lost bits, so that only 1 + w is the same F32 number.
    OnePlus,
    /// -exp(a) is stored, for a = A_log. Rounded to BF16, ln(-x) is the source's word.
    NegativeExp,
}

/// Where tiled value heads lie: the stored order is (r, key head), the source's (key head, r), r = value heads per key
/// head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heads {
    /// Nowhere.
    None,
    /// One value a head: the only axis of a vector, or the rows of a matrix.
    Single,
    /// Rows, `value_dim` a head.
    Rows,
    /// Rows behind those of the queries and keys, `value_dim` a head.
    RowsBehindKeys,
    /// Columns, `value_dim` a head.
    Columns,
}

/// How stored and source shape are related.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The same.
    Same,
    /// [C, taps] here, [C, 1, taps] there.
    Convolution,
    /// [H] here, [1, H] there.
    OneRow,
    /// Rows of the query heads, the first of a source tensor whose others are the key's.
    IndexerQuery,
    /// Rows of the key, the last of that tensor.
    IndexerKey,
    /// [E, I, H], the first I rows of each expert's 2I in the source.
    ExpertGate,
    /// [E, I, H], the last I rows.
    ExpertUp,
    /// The first half of the stored columns.
    LeftColumns,
    /// The second half.
    RightColumns,
}

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Where it applies.
    pub scope: Scope,
    /// Name in the GGUF file, below `blk.N.` where the scope says so.
    pub gguf: &'static str,
    /// Name in the source checkpoint, below the scope's prefix.
    pub source: &'static str,
    /// What was done to the values.
    pub values: Values,
    /// Where tiled value heads lie.
    pub heads: Heads,
    /// How the shapes are related.
    pub form: Form,
    /// Architectures that it holds for.
    pub only: &'static [Architecture],
}

const ALL: &[Architecture] = &[Architecture::Qwen35, Architecture::Qwen35Moe, Architecture::Qwen4Exp];
const QWEN35: &[Architecture] = &[Architecture::Qwen35, Architecture::Qwen35Moe];
const DENSE: &[Architecture] = &[Architecture::Qwen35];
const MOE: &[Architecture] = &[Architecture::Qwen35Moe, Architecture::Qwen4Exp];
const QWEN4: &[Architecture] = &[Architecture::Qwen4Exp];

const fn rule(scope: Scope, only: &'static [Architecture], gguf: &'static str, source: &'static str) -> Rule {
    Rule { scope, gguf, source, values: Values::Same, heads: Heads::None, form: Form::Same, only }
}

impl Rule {
    const fn values(mut self, values: Values) -> Self {
        self.values = values;
        self
    }
    const fn norm(self) -> Self {
        self.values(Values::OnePlus)
    }
    const fn heads(mut self, heads: Heads) -> Self {
        self.heads = heads;
        self
    }
    const fn form(mut self, form: Form) -> Self {
        self.form = form;
        self
    }
}

const fn block(only: &'static [Architecture], gguf: &'static str, source: &'static str) -> Rule {
    rule(Scope::Block, only, gguf, source)
}

const fn drafter(only: &'static [Architecture], gguf: &'static str, source: &'static str) -> Rule {
    rule(Scope::Drafter, only, gguf, source)
}

/// Every tensor that the architectures have. `attn_q` needs no entry of its own: per head, query rows then gate rows, in
/// both. A tensor in no rule is an error that names it.
pub const RULES: &[Rule] = &[
    rule(Scope::Model, ALL, "token_embd.weight", "embed_tokens.weight"),
    rule(Scope::Root, ALL, "output.weight", "lm_head.weight"),
    rule(Scope::Model, QWEN35, "output_norm.weight", "norm.weight").norm(),
    rule(Scope::Model, QWEN4, "output_hc_norm.weight", "hyper_connection_mixer.hc_norm.weight").norm(),
    rule(Scope::Model, QWEN4, "output_hc_down.weight", "hyper_connection_mixer.input_mix_weight_down.weight"),
    rule(Scope::Model, QWEN4, "output_hc_up.weight", "hyper_connection_mixer.input_mix_weight_up.weight"),
    rule(Scope::Table, QWEN4, "per_layer_token_embd.weight", "ple.ple_embedding.ngram_embedding.weight"),
    // Norms of a block.
    block(QWEN35, "attn_norm.weight", "input_layernorm.weight").norm(),
    block(QWEN35, "post_attention_norm.weight", "post_attention_layernorm.weight").norm(),
    // Hyper-connections.
    block(QWEN4, "hc_attn_norm.weight", "attn_hyper_connection.hc_norm.weight").norm(),
    block(QWEN4, "hc_attn_down.weight", "attn_hyper_connection.input_mix_weight_down.weight"),
    block(QWEN4, "hc_attn_up.weight", "attn_hyper_connection.input_mix_weight_up.weight"),
    block(QWEN4, "hc_attn_inject.weight", "attn_hyper_connection.block_inject_weight.weight"),
    block(QWEN4, "hc_ffn_norm.weight", "mlp_hyper_connection.hc_norm.weight").norm(),
    block(QWEN4, "hc_ffn_down.weight", "mlp_hyper_connection.input_mix_weight_down.weight"),
    block(QWEN4, "hc_ffn_up.weight", "mlp_hyper_connection.input_mix_weight_up.weight"),
    block(QWEN4, "hc_ffn_inject.weight", "mlp_hyper_connection.block_inject_weight.weight"),
    // Attention.
    block(ALL, "attn_q.weight", "self_attn.q_proj.weight"),
    block(ALL, "attn_k.weight", "self_attn.k_proj.weight"),
    block(ALL, "attn_v.weight", "self_attn.v_proj.weight"),
    block(ALL, "attn_output.weight", "self_attn.o_proj.weight"),
    block(ALL, "attn_q_norm.weight", "self_attn.q_norm.weight").norm(),
    block(ALL, "attn_k_norm.weight", "self_attn.k_norm.weight").norm(),
    block(QWEN4, "indexer.q_proj.weight", "self_attn.indexer.index_qk_proj.weight").form(Form::IndexerQuery),
    block(QWEN4, "indexer.k_proj.weight", "self_attn.indexer.index_qk_proj.weight").form(Form::IndexerKey),
    block(QWEN4, "indexer.q_norm.weight", "self_attn.indexer.q_layernorm.weight").norm(),
    block(QWEN4, "indexer.k_norm.weight", "self_attn.indexer.k_layernorm.weight").norm(),
    // Gated delta net.
    block(ALL, "attn_qkv.weight", "linear_attn.in_proj_qkv.weight").heads(Heads::RowsBehindKeys),
    block(ALL, "attn_gate.weight", "linear_attn.in_proj_z.weight").heads(Heads::Rows),
    block(ALL, "ssm_alpha.weight", "linear_attn.in_proj_a.weight").heads(Heads::Single),
    block(ALL, "ssm_beta.weight", "linear_attn.in_proj_b.weight").heads(Heads::Single),
    block(ALL, "ssm_a", "linear_attn.A_log").heads(Heads::Single).values(Values::NegativeExp),
    block(ALL, "ssm_dt.bias", "linear_attn.dt_bias").heads(Heads::Single),
    block(ALL, "ssm_conv1d.weight", "linear_attn.conv1d.weight")
        .heads(Heads::RowsBehindKeys)
        .form(Form::Convolution),
    block(ALL, "ssm_norm.weight", "linear_attn.norm.weight"),
    block(ALL, "ssm_out.weight", "linear_attn.out_proj.weight").heads(Heads::Columns),
    // Dense MLP.
    block(DENSE, "ffn_gate.weight", "mlp.gate_proj.weight"),
    block(DENSE, "ffn_up.weight", "mlp.up_proj.weight"),
    block(DENSE, "ffn_down.weight", "mlp.down_proj.weight"),
    // Mixture of experts.
    block(MOE, "ffn_gate_inp.weight", "mlp.gate.weight"),
    block(MOE, "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight").form(Form::OneRow),
    block(MOE, "ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    block(MOE, "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    block(MOE, "ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
    block(MOE, "ffn_gate_exps.weight", "mlp.experts.gate_up_proj").form(Form::ExpertGate),
    block(MOE, "ffn_up_exps.weight", "mlp.experts.gate_up_proj").form(Form::ExpertUp),
    block(MOE, "ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj"),
    block(MOE, "ffn_down_exps.weight", "mlp.experts.down_proj"),
    // n-gram injection.
    block(QWEN4, "ple_key.weight", "ple.key_proj.weight"),
    block(QWEN4, "ple_value.weight", "ple.value_proj.weight"),
    block(QWEN4, "ple_norm_key.weight", "ple.norm_key.weight").norm(),
    block(QWEN4, "ple_norm_query.weight", "ple.norm_query.weight").norm(),
    block(QWEN4, "ple_norm_conv.weight", "ple.norm_conv.weight").norm(),
    block(QWEN4, "ple_conv1d.weight", "ple.conv1d.weight").form(Form::Convolution),
    // The drafter. Its norms store 1 + w like all others (compared with a checkpoint).
    drafter(QWEN35, "nextn.eh_proj.weight", "fc.weight"),
    drafter(QWEN4, "nextn.eh_proj.weight", "fc_embedding.weight").form(Form::LeftColumns),
    drafter(QWEN4, "nextn.eh_proj.weight", "fc_hidden.weight").form(Form::RightColumns),
    drafter(ALL, "nextn.enorm.weight", "pre_fc_norm_embedding.weight").norm(),
    drafter(ALL, "nextn.hnorm.weight", "pre_fc_norm_hidden.weight").norm(),
    drafter(QWEN35, "nextn.shared_head_norm.weight", "norm.weight").norm(),
    drafter(QWEN4, "nextn.hc_head_norm.weight", "hyper_connection_mixer.hc_norm.weight").norm(),
    drafter(QWEN4, "nextn.hc_head_down.weight", "hyper_connection_mixer.input_mix_weight_down.weight"),
    drafter(QWEN4, "nextn.hc_head_up.weight", "hyper_connection_mixer.input_mix_weight_up.weight"),
];

/// Integer buffers of the n-gram hash, which a GGUF keeps as metadata: key below `qwen4exp.` and source name below the
/// PLE layer.
pub const HASH_CONSTANTS: [(&str, &str); 3] = [
    ("ple.layer_multipliers", "ple.ple_embedding.layer_multipliers"),
    ("ple.head_offsets", "ple.ple_embedding.ngram_heads_offsets"),
    ("ple.head_vocab_sizes", "ple.ple_embedding.ngram_heads_vocab_sizes"),
];
