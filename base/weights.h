// A model's tensors: what each is, where it is in a checkpoint's files, and how they move into a machine's memory.
//
//   config.json, generation_config.json                          -> Config (config.h)
//   model.safetensors, or, if the weights are split, model.safetensors.index.json, which says which
//   tensor is in which file                                      -> Model
//
// Weights are mapped, not read. Loading touches only the headers; a page of weights comes from the disk when a product
// first needs it. A model takes its files' size in memory (shared with the page cache) and no more.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "config.h"
#include "device.h"
#include "safetensors.h"

// ---- What a checkpoint becomes -------------------------------------------------------------------------------------

// The last two are never in a file. int8: see Int8Block (formats.h). bf16_pairs: bf16 whose products take two
// neighbours at a time, with inputs that are rounded to bf16, too.
enum class DType { f32, f16, bf16, int8, bf16_pairs };

inline int dtype_bytes(DType type) { return type == DType::f32 ? 4 : type == DType::int8 ? 1 : 2; }
inline const char *dtype_name(DType type) {
    const char *names[] = {"f32", "f16", "bf16", "int8", "bf16"};
    return names[(int)type];
}

// A row-major matrix (rows, cols) in a mapped file or in a machine's memory. A vector has one row.
struct Tensor {
    const void *data = nullptr;  // nullptr: this model has no such tensor
    DType type = DType::f32;
    int64_t rows = 0, cols = 0;
};

HOST_DEVICE inline float number_of(const Tensor &tensor, int64_t i) {
    if (tensor.type == DType::f32) return ((const float *)tensor.data)[i];
    if (tensor.type == DType::f16) return to_float(((const f16 *)tensor.data)[i]);
    return to_float(((const bf16 *)tensor.data)[i]);
}

struct Linear {     // y = weight x + bias
    Tensor weight;  // (outputs, inputs)
    Tensor bias;    // (1, outputs), absent in most families
};

// How a layer adds its second embedding of each token, P numbers wide, to x (Gemma 4 E2B and E4B).
struct PerLayer {
    Linear projection;  // (P, hidden), of the first embedding; its result is normed, and the second one added
    Linear gate;        // (P, hidden), of x
    Linear output;      // (hidden, P)
    Tensor out_norm;    // (1, hidden)
    float scale = 1;    // factor of x at the end
};

// D is the width of keys in the layer's kind. Query, key and value have D rows per head, head after head, in the
// half-split order of RoPE: component i rotates together with component i + D / 2.
struct LayerWeights {
    Tensor attention_norm;                  // (1, hidden)
    Linear query;                           // (heads * D, hidden)
    Linear key, value;                      // (kv_heads * D, hidden); absent if another layer's rows are read
    Linear output;                          // (hidden, heads * D)
    Tensor query_norm, key_norm;            // (1, D): RMSNorm of each head before RoPE (Qwen3), absent elsewhere
    Tensor all_query_norm, all_key_norm;    // (1, heads * D), (1, kv_heads * D): RMSNorm of all heads as one (OLMo 2)
    Tensor value_norm;                      // (1, D): RMSNorm of each head, with weights of 1 (Gemma 4)
    Tensor sinks;                           // (1, heads): learned sinks, scores without a value (gpt-oss)
    Tensor mlp_norm;                        // (1, hidden)
    Linear gate, up;                        // (ffn, hidden)
    Linear down;                            // (hidden, ffn)
    Tensor attention_out_norm, mlp_out_norm;  // (1, hidden): RMSNorm of what is added to x (Gemma 3), absent elsewhere
    Tensor taps, taps_bias;  // (hidden, L), (1, hidden): of a short convolution (LFM2). Its query, key and value are
                             // the parts C, B and x of in_proj, (hidden, hidden) each
    float scale = 1;  // factor of x at the end of the MLP; if it is not 1, there is an mlp_out_norm
    PerLayer per_layer;
};

// Move-only, as tensors point into `files` and `copies`, which live as long as the model.
struct Model {
    Config config;
    Tensor embedding;   // (vocabulary, hidden)
    Tensor final_norm;  // (1, hidden)
    Tensor head;        // (vocabulary, hidden): the embedding itself when tied
    Tensor layer_embedding;  // (layer_vocabulary, layers * P): second embeddings of each token, or absent
    Tensor layer_norm;       // (1, P): see PerLayer
    std::vector<LayerWeights> layers;
    int64_t weight_bytes = 0, parameters = 0;  // of all tensors above; a tied head counts once
    std::vector<Mapping> files;
    std::vector<std::unique_ptr<char[]>> copies;  // tensors that were not aligned in their file, or were computed
    std::string beside;  // tensors outside the text model: "score.weight and 2 others"
};

// ---- Numbers -------------------------------------------------------------------------------------------------

// Calls use(p) with a tensor's numbers in a file's types: `const float *`, `const f16 *` or `const bf16 *`.
template <class Use>
void with_numbers(const Tensor &tensor, Use use) {
    if (tensor.type == DType::f32) return use((const float *)tensor.data);
    if (tensor.type == DType::f16) return use((const f16 *)tensor.data);
    if (tensor.type == DType::bf16) return use((const bf16 *)tensor.data);
    fail("%s weights where only numbers as a file stores them are read", dtype_name(tensor.type));
}

// ---- Each tensor, once ---------------------------------------------------------------------------------------------

// Where a tensor comes from.
struct Part {
    int first = 0, all = 0;  // rows from `first` on in a matrix of `all` rows; 0: a matrix of its own
};
struct Origin {
    std::string name;            // Llama's name after "model."; "": in no file, each number is 1
    std::vector<int64_t> shape;  // a vector has only its width
    bool matrix = false;         // every token is multiplied by it
    Part part = {};              // the bias of such a matrix has one, too
    bool norm = false;           // weights of RMSNorm, to be multiplied by `scale`
    double scale = 1;
};
inline Origin norm_of(const std::string &name, int width, double scale = 1) {
    return {name + ".weight", {width}, false, {}, /*norm=*/true, scale};
}

// Calls visit(tensor, whether this layer has it, its origin) once for each tensor of a layer. Loading and moving them
// and counting operations all use this list.
template <class Layer, class Visit>
void visit_layer(Layer &w, const Config &config, int index, Visit &visit) {
    const Family &family = *config.family;
    const Kind &kind = config.kind(index);
    const bool own = config.rows[(size_t)index].own, convolves = kind.taps > 0, attends = !convolves;
    const int hidden = config.hidden, more = config.per_layer, width = kind.key_width;
    const int query = (convolves ? 1 : config.heads) * width, kv = kind.kv_heads * width;
    const std::string layer = "layers." + std::to_string(index) + ".", mlp = layer + "mlp.";
    const std::string mixer = layer + (convolves ? "conv." : "self_attn.");
    auto linear = [&](auto &to, bool here, const std::string &name, int outputs, int inputs, bool bias,
                      Part part = {}) {
        visit(to.weight, here, Origin{name + ".weight", {outputs, inputs}, /*matrix=*/true, part});
        visit(to.bias, here && bias, Origin{name + ".bias", {outputs}, false, part});
    };

    // Some files have query, key and value in one matrix. A convolution's are C, B and x, in another order.
    const bool bias = convolves ? config.convolution_bias : config.qkv_bias;
    const bool output_bias = convolves ? config.convolution_bias : config.output_bias;
    const std::string joint = convolves ? "in_proj" : family.fused_qkv ? "qkv_proj" : "";
    auto input = [&](auto &to, bool here, const char *name, int outputs, int first) {
        if (joint.empty()) return linear(to, here, mixer + name, outputs, hidden, bias);
        linear(to, here, mixer + joint, outputs, hidden, bias, {first, query + 2 * kv});
    };
    input(w.query, true, "q_proj", query, convolves ? kv : 0);
    input(w.key, own, "k_proj", kv, convolves ? 0 : query);
    input(w.value, own, config.keys_are_values && !kind.window ? "k_proj" : "v_proj", kv, query + kv);
    visit(w.query_norm, attends && family.head_norms, norm_of(mixer + "q_norm", width));
    visit(w.key_norm, attends && family.head_norms && own, norm_of(mixer + "k_norm", width));
    visit(w.value_norm, attends && family.value_norms && own, Origin{"", {width}});
    visit(w.all_query_norm, family.all_norms, norm_of(mixer + "q_norm", query));
    visit(w.all_key_norm, family.all_norms, norm_of(mixer + "k_norm", kv));
    visit(w.sinks, family.sinks, Origin{mixer + "sinks", {config.heads}});
    visit(w.taps, convolves, Origin{mixer + "conv.weight", {hidden, 1, kind.taps}});
    visit(w.taps_bias, convolves && bias, Origin{mixer + "conv.bias", {hidden}});
    linear(w.output, true, mixer + "o_proj", hidden, query, output_bias);

    const int ffn = !own && config.shared_ffn ? config.shared_ffn : config.ffn;
    const bool both = family.fused_mlp;
    const std::string gate = both ? "gate_up_proj" : "gate_proj", up = both ? gate : "up_proj";
    linear(w.gate, true, mlp + gate, ffn, hidden, config.mlp_bias, both ? Part{0, 2 * ffn} : Part{});
    linear(w.up, true, mlp + up, ffn, hidden, config.mlp_bias, both ? Part{ffn, 2 * ffn} : Part{});
    linear(w.down, true, mlp + "down_proj", hidden, ffn, config.mlp_bias);

    // With norms after, Llama's name of the norm before the MLP is the name of another norm.
    const bool before = family.norms_before, after = family.norms_after;
    visit(w.attention_norm, before, norm_of(layer + "input_layernorm", hidden));
    const char *mlp_norm = after ? "pre_feedforward_layernorm" : "post_attention_layernorm";
    visit(w.mlp_norm, before, norm_of(layer + mlp_norm, hidden));
    visit(w.attention_out_norm, after, norm_of(layer + "post_attention_layernorm", hidden));
    visit(w.mlp_out_norm, after, norm_of(layer + "post_feedforward_layernorm", hidden));

    auto &second = w.per_layer;
    const Part mine = {index * more, config.layers * more};
    linear(second.projection, more, "per_layer_model_projection", more, hidden, false, mine);
    linear(second.gate, more, layer + "per_layer_input_gate", more, hidden, false);
    linear(second.output, more, layer + "per_layer_projection", hidden, more, false);
    visit(second.out_norm, more, norm_of(layer + "post_per_layer_input_norm", hidden));
}

// Calls visit() once for each tensor of a model. The second embedding with the projection of the first is
// (embedding * sqrt(P) + RMSNorm(projection)) / sqrt(2). The division is part of Config::layer_scale for the embedding,
// and of the norm's weights, which are scaled here.
template <class M, class Visit>
void visit_tensors(M &model, Visit visit) {
    const Config &config = model.config;
    const int hidden = config.hidden, more = config.per_layer;
    visit(model.embedding, true, Origin{"embed_tokens.weight", {config.vocabulary, hidden}});
    visit(model.head, true, Origin{"lm_head.weight", {config.vocabulary, hidden}, /*matrix=*/true});
    visit(model.layer_embedding, more,
          Origin{"embed_tokens_per_layer.weight", {config.layer_vocabulary, config.layers * more}});
    visit(model.layer_norm, more, norm_of("per_layer_projection_norm", more, std::sqrt(0.5)));
    for (int i = 0; i < config.layers; i++) visit_layer(model.layers[(size_t)i], config, i, visit);
    visit(model.final_norm, true, norm_of("norm", hidden, config.logit_scale));
}

// Takes tensors from the table by name, and refuses a shape that the config does not ask for.
struct Binder {
    const TensorTable &table;
    Model &model;
    std::string outer = "", prefix = "model.";  // of lm_head's name; of all others
    std::map<std::string, Tensor> taken = {};

    // Returns the name in this file for Llama's. A family has its own names for some parts between dots; if the head is
    // the embedding, a file may have either.
    std::string named(std::string name) const {
        const std::string embedding = "embed_tokens.weight", head = "lm_head.weight";
        if (model.config.tied && (name == embedding || name == head))
            name = table.tensors.count(outer + head) ? head : embedding;
        name = (name.rfind("lm_head.", 0) == 0 ? outer : prefix) + name;
        for (const auto &[llama, own] : model.config.family->names) {
            const size_t at = llama ? ("." + name + ".").find("." + std::string(llama) + ".") : std::string::npos;
            if (at != std::string::npos) name.replace(at, strlen(llama), own);
        }
        return name;
    }
    // Bytes that live as long as the model.
    char *room(size_t bytes) { return model.copies.emplace_back(new char[bytes]).get(); }
    Tensor take(const std::string &llama_name, const std::vector<int64_t> &shape) {
        const std::string name = named(llama_name);
        const auto found = table.tensors.find(name);
        const StoredTensor *stored = found == table.tensors.end() ? nullptr : &found->second;
        if (!stored)
            fail("%s: tensor %s is missing, config.json asks for it (%s, %s)", table.name.c_str(), name.c_str(),
                 model.config.family->architecture, counted(model.config.layers, "layer").c_str());
        if (stored->shape != shape)
            fail("%s: tensor %s has shape %s, config.json asks for %s", stored->file.c_str(), name.c_str(),
                 printable(json_of(stored->shape)).c_str(), json_of(shape).c_str());
        if (taken.count(name)) return taken.at(name);
        const std::vector<std::string> types = {"F32", "F16", "BF16"};  // in the order of DType
        const auto type = std::find(types.begin(), types.end(), stored->dtype);
        if (type == types.end())
            fail("%s: tensor %s has dtype %s, supported are F32 F16 BF16", stored->file.c_str(), name.c_str(),
                 printable(stored->dtype).c_str());
        Tensor tensor{stored->data, (DType)(type - types.begin()), shape.size() == 1 ? 1 : shape[0], shape.back()};
        if ((uintptr_t)tensor.data % (uintptr_t)dtype_bytes(tensor.type))
            tensor.data = memcpy(room(stored->bytes), stored->data, stored->bytes);
        model.weight_bytes += (int64_t)stored->bytes;
        model.parameters += tensor.rows * tensor.cols;
        return taken[name] = tensor;
    }
    // Makes a vector of float32 that no file has in this form.
    template <class Number>
    Tensor made(int64_t width, Number number) {
        float *copy = (float *)room((size_t)width * sizeof(float));
        for (int64_t i = 0; i < width; i++) copy[i] = number(i);
        return {copy, DType::f32, 1, width};
    }
    // Points a tensor of the model to its numbers. Gemma 3 stores a norm's weights minus 1.
    void operator()(Tensor &to, bool here, const Origin &from) {
        if (!here) return;
        if (from.name.empty()) return void(to = made(from.shape[0], [](int64_t) { return 1.0f; }));
        std::vector<int64_t> shape = from.shape;
        if (from.part.all) shape[0] = from.part.all;
        to = take(from.name, shape);
        int64_t &length = shape.size() == 1 ? to.cols : to.rows, row = shape.size() == 1 ? 1 : to.cols;
        to.data = (const char *)to.data + from.part.first * row * dtype_bytes(to.type), length = from.shape[0];
        const float one = from.norm && model.config.family->one_plus;
        if (one == 0 && from.scale == 1) return;
        to = made(to.cols, [&, stored = to](int64_t i) { return (one + number_of(stored, i)) * (float)from.scale; });
    }
};

// Refuses a tensor of the text model that nothing here reads. It means another computation: an architecture under
// another's name, a bias or layers that the config does not mention. Ignored, as in Transformers, are the RoPE tables
// of old Llamas (rotary_emb.inv_freq), which follow from the config, and tensors outside the text model: those that see
// or hear, and heads for other tasks (score, v_head).
inline void refuse_unused(Binder &binder) {
    const Config &config = binder.model.config;
    size_t beside = 0;
    std::set<std::string> parts;
    for (const auto &[name, tensor] : binder.taken) parts.insert(name.substr(0, name.find('.') + 1));
    for (const auto &[name, tensor] : binder.table.tensors) {
        if (binder.taken.count(name) || name.find("rotary_emb.") != std::string::npos) continue;
        const std::string part = name.substr(0, name.find('.') + 1);  // a base model has "layers." and the like
        const bool own = binder.prefix.empty() ? parts.count(part) > 0 : name.rfind(binder.prefix, 0) == 0;
        if (own || name.rfind(binder.outer + "lm_head.", 0) == 0)
            fail("%s: tensor %s is none of a %s with %s: config.json must name the architecture it belongs to",
                 tensor.file.c_str(), printable(name).c_str(), config.family->architecture,
                 counted(config.layers, "layer").c_str());
        if (beside++ == 0) binder.model.beside = printable(name);
    }
    if (beside > 1) binder.model.beside += " and " + counted((int64_t)beside - 1, "other");
}

// Returns a model whose tensors point into the table's; the caller keeps the memory of the table alive. The head is the
// embedding if the config ties them. As in Transformers 5, the files decide in the end: if a tied checkpoint stores
// both, each is used as it is (some store the same matrix twice); if it stores one, that is used for both.
inline Model bind_weights(Config config, const TensorTable &table) {
    Model model;
    model.config = std::move(config);
    model.layers.resize((size_t)model.config.layers);
    Binder binder{table, model};
    // The last prefix that fits: a text model may be a part of a larger one, and a base model may have no prefix.
    for (const char *prefix : {"", "language_model.", "model.", "language_model.model.", "model.language_model."}) {
        const auto at = table.tensors.lower_bound(prefix + std::string("layers."));
        if (at != table.tensors.end() && at->first.rfind(prefix + std::string("layers."), 0) == 0)
            binder.prefix = prefix;
    }
    if (table.tensors.count("language_model.lm_head.weight")) binder.outer = "language_model.";
    if (table.tensors.count(binder.prefix + "embed_tokens.weight") &&
        table.tensors.count(binder.outer + "lm_head.weight"))
        model.config.tied = false;
    visit_tensors(model, std::ref(binder));
    for (int i = 0; i < model.config.layers; i++) {
        const std::string layer = "layers." + std::to_string(i) + ".", attention = layer + "self_attn.";
        LayerWeights &w = model.layers[(size_t)i];
        if (model.config.family->ways == Ways::gemma4)  // the factor at the layer's end
            (model.config.per_layer ? w.per_layer.scale : w.scale) =
                number_of(binder.take(layer + "layer_scalar", {1}), 0);
        if (model.config.rows[(size_t)i].own) continue;
        for (const char *unused : {"k_proj", "v_proj", "k_norm", "v_norm"})  // files may have them for shared rows
            binder.taken[binder.named(attention + unused + ".weight")] = {};
    }
    refuse_unused(binder);
    return model;
}

inline Model load_model(const std::string &directory) {
    Config config = load_config(directory);
    std::vector<Mapping> files;
    Model model = bind_weights(std::move(config), open_weights(directory, files));
    model.files = std::move(files);
    return model;
}

// ---- Moving --------------------------------------------------------------------------------------------------

inline size_t stored_bytes(const Tensor &tensor) {
    if (tensor.type == DType::int8) return int8_bytes(tensor.rows, tensor.cols);
    return (size_t)(tensor.rows * tensor.cols) * dtype_bytes(tensor.type);
}

// Calls use(tensor, matrix) for each tensor; `matrix`: every token is multiplied by it.
template <class M, class Use>
void for_each_tensor(M &model, Use use) {
    visit_tensors(model, [&](auto &tensor, bool, const Origin &from) { use(tensor, from.matrix); });
}

// Sets whether products with a model's matrices, all in bf16, round their inputs to bf16, too.
inline void round_inputs(Model &model, bool rounded) {
    for_each_tensor(model, [&](Tensor &tensor, bool matrix) {
        if (!matrix || !tensor.data) return;
        if (tensor.type != DType::bf16 && tensor.type != DType::bf16_pairs)
            fail("--activations bf16: belongs to weights in bf16, here are some in %s: leave it out",
                 dtype_name(tensor.type));
        tensor.type = rounded ? DType::bf16_pairs : DType::bf16;
    });
}

// Quantizes a matrix to int8. Threads share its blocks of 16 rows.
inline void write_int8(Cpu &cpu, Int8Block *to, const Tensor &matrix) {
    std::atomic<bool> good{true};
    int64_t groups = int8_groups(matrix.cols);
    with_numbers(matrix, [&](auto *numbers) {
        cpu.run([&] {
            cpu.for_each(int8_panels(matrix.rows), [&](int64_t panel, Alone) {
                int rows = (int)std::min<int64_t>(int8_rows, matrix.rows - panel * int8_rows);
                if (!quantize(to + panel * groups, numbers + panel * int8_rows * matrix.cols, rows, matrix.cols))
                    good = false;
            });
        });
    });
    if (!good)
        fail("--weights int8: a weight is NaN or beyond 8.3e6, which its scales cannot hold: leave the flag out");
}

// Copies tensors from the mapped files to the machine's memory, which it returns: all as they are, or only the
// matrices, as int8. An embedding, which is looked up by token, stays: a tied model's head becomes a tensor of its own.
inline std::shared_ptr<void> move_weights(Model &model, Machine &machine, bool to_int8) {
    constexpr size_t alignment = 256, piece = 64 << 20;
    Memory &memory = std::visit([](auto &m) -> Memory & { return m; }, machine);
    auto moves = [&](const Tensor &tensor, bool matrix) { return tensor.data && (matrix || !to_int8); };
    auto moved = [&](Tensor tensor) { return tensor.type = to_int8 ? DType::int8 : tensor.type, tensor; };

    // A place for each tensor, once, as a tied head is the embedding. The map has the order of addresses in the files.
    std::map<const void *, std::pair<Tensor, size_t>> places;  // a tensor, and its offset in the memory
    size_t total = 0;
    for_each_tensor(model, [&](const Tensor &tensor, bool matrix) {
        if (!moves(tensor, matrix) || places.count(tensor.data)) return;
        places[tensor.data] = {tensor, total};
        total += (stored_bytes(moved(tensor)) + alignment - 1) / alignment * alignment;
    });
    Room room = memory.room();
    if ((double)total > room.bytes)
        fail("the weights need %.3f GiB, %s has %.3f GiB free: choose a smaller model, another --weights or --device",
             (double)total / 0x1p30, room.name.c_str(), room.bytes / 0x1p30);
    std::shared_ptr<void> weights =
        memory.reserve(total, "the weights", "choose a smaller model, or leave --weights out");
    char *start = (char *)weights.get();

    // Copies in pieces, so that Ctrl-C is noticed. A file's pages are given back after they were read.
    Progress progress("weights", (double)total / 1e6, "MB");
    for (auto &[data, place] : places) {
        const size_t bytes = stored_bytes(moved(place.first));
        char *to = start + place.second;
        if (to_int8) write_int8(std::get<Cpu>(machine), (Int8Block *)to, place.first);
        for (size_t at = 0; !to_int8 && at < bytes && !interrupted(); at += piece)
            memory.write(to + at, (const char *)data + at, std::min(piece, bytes - at));
        stop_if_interrupted();
        Progress::add((double)bytes / 1e6);
        for (const Mapping &file : model.files) forget_pages(file);
    }

    // Points the model's tensors there, and counts their bytes again, as int8 takes others.
    std::set<const void *> counted;
    model.weight_bytes = 0;
    for_each_tensor(model, [&](Tensor &tensor, bool matrix) {
        if (moves(tensor, matrix)) tensor = moved(tensor), tensor.data = start + places.at(tensor.data).second;
        if (tensor.data && counted.insert(tensor.data).second) model.weight_bytes += (int64_t)stored_bytes(tensor);
    });
    return weights;
}
