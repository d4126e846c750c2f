"""The docstrings of libtorchbeast, by name: of the module, its classes and methods.

The module reads them while it is made. `Queue` stands for BatchingQueue and
DynamicBatcher.
"""

DOCS = {
    "": """The C++ core of PolyBeast: queues, batching, actor pool, environments.

Nests are tuples, lists and dicts of leaves; leaves are torch tensors on the CPU or NumPy
arrays. What comes out has tuples and dicts. Its leaves share memory with the core: torch
tensors if torch is imported, else NumPy arrays. torch is never imported here.

Calls that block let other threads run, and Ctrl-C interrupts them, but for stop()
and close(), which have time limits.
""",
    "Security": """
How one side of a connection proves its identity, and what proof it wants of the other.
Server, Client, Listener, ActorPool and probe() take it. It can't be changed, and its repr
shows no secret. Security() is plain: enough for unix sockets of this user and for
addresses that only this machine reaches.

Args, all by name:
    tls: use TLS for host:port addresses; so does each of the next four. Files are read
        here, once.
    tls_ca: path of a PEM file: certificates that must have signed the other side's. None:
        the side that connects trusts the system's, and the side that listens wants none.
    tls_cert, tls_key: paths of PEM files: this side's certificate and its key. The side
        that listens needs them for TLS.
    tls_server_name: for the side that connects: the name in the other side's certificate,
        if it is not the host's.
    token: the side that connects shows it, and the side that listens refuses all others.
    insecure: allow, beyond this machine, plain TCP, and TLS without tls_ca and token on
        the side that listens. Also allow unix sockets of other users.

Raises:
    ValueError: a file cannot be read or used, or a text is empty.
""",
    "ClosedBatchingQueue": "The queue or batcher was closed.",
    "AsyncError": "The batch that a computation was part of has no answer.",
    "TransportError": "A connection could not be made, was lost or refused.",
    "RefusedError": "The other side refuses: a wrong token, another version, ...",
    "WireError": "The other side broke the protocol's rules.",
    "Queue.size": "The number of items that wait.",
    "Queue.close": """
End all calls that wait and all iterations, and drop the items that wait.

Raises:
    RuntimeError: it was closed already.
""",
    "Queue.stats": """
Counters since the beginning: num_batches, num_items and num_entries (along batch_dim) in
them, bytes_copied, pool_bytes (memory held for batches and answers).
""",
    "BatchingQueue": """
A queue whose items come out joined along a dimension.

Items are nests (tuples, lists, dicts) of torch tensors or NumPy arrays. All items have
the same structure, dtypes, and sizes except along `batch_dim`. Iterating yields nests of
tuples and dicts. Their leaves are the items' leaves, joined along batch_dim: torch tensors
if torch is imported, else NumPy arrays. Any number of threads may enqueue and iterate.

A C-contiguous, writable array is not copied until its batch is made; do not write to it
before that. A batch of a single item is that item itself, without a copy, unless there is
an allocator.

The memory of a batch is used again as soon as no array that shares it is left. Keep an
array until a copy from it to a GPU is done: with pinned memory, x.to(device,
non_blocking=True) returns while the copy is still in flight. Reading a result that depends
on the copy, such as loss.item(), waits for it.

Args:
    batch_dim: the dimension along which items are joined.
    minimum_batch_size: a batch with this many entries along batch_dim is complete. An
        item has one or more.
    maximum_batch_size: entries that a batch never exceeds.
    timeout_ms: how long an incomplete batch waits for more, in milliseconds. None or inf:
        for ever, or until the queue is full.
    check_inputs: for older code; items are always checked.
    maximum_queue_size: items that may wait before enqueue() blocks. None: any number.
    allocator: function of a number of bytes that returns writable memory of at least that
        size, in which batches are made: a torch tensor, for example of pinned memory, or
        an object with the buffer protocol.

Raises:
    ValueError: an argument is out of range.
""",
    "BatchingQueue.enqueue": """
Add an item; block while the queue is full.

Raises:
    ValueError: an empty nest, a leaf with too few dimensions, leaves whose sizes along
        batch_dim differ, an item that does not fit to those that wait, or a leaf that
        cannot be shared, such as a CUDA tensor. Names the place in the nest.
    TypeError: a leaf that is neither a torch tensor nor a NumPy array.
    ClosedBatchingQueue: the queue was closed before there was room.
""",
    "Batch": """
Inputs of several callers of DynamicBatcher.compute(), joined. Iterating over the batcher
yields them. Answer each with set_outputs() or set_error(); if it is dropped without an
answer, its callers get AsyncError. len() is the number of entries along batch_dim.
""",
    "Batch.get_inputs": """
The inputs, joined along batch_dim; a nest as in BatchingQueue. Do not write to them: a
batch with a single caller holds the caller's memory. The batch keeps this memory.
""",
    "Batch.set_outputs": """
Answer: every caller gets its entries along batch_dim of every leaf, copied.

Raises:
    ValueError: a leaf does not have len(batch) entries along batch_dim, the nest is empty,
        or a leaf cannot be shared. The batch can still be answered.
    RuntimeError: the batch was answered before.
""",
    "Batch.set_error": """
Answer with an error: every caller gets AsyncError with this text.

Raises:
    RuntimeError: the batch was answered before.
""",
    "DynamicBatcher": """
Joins the inputs of many threads into batches, and gives each thread its part of the
answer. They wait as long as the batch is alive, which an exception that somebody keeps
holds, too: a loop that can fail answers with set_error().

    for batch in batcher:
        batch.set_outputs(model(batch.get_inputs()))

Args:
    check_outputs: for older code; inputs and outputs are always checked.
    The others as in BatchingQueue; timeout_ms is 100 by default.

Raises:
    ValueError: an argument is out of range.
""",
    "DynamicBatcher.compute": """
Block until a consumer has answered, and return this caller's part of the answer.

Raises:
    ValueError, TypeError: as BatchingQueue.enqueue().
    ClosedBatchingQueue: the batcher was closed.
    AsyncError: the batch was dropped without an answer, or answered with an error.
""",
    "ActorPool": """
Runs the environments of servers against batched inference, and makes rollouts.

Each address gets a stream of E environments. At each step the pool hands inference_batcher

    ((observation, reward, done, episode_step, episode_return), agent_state)

with leaves [1, E, ...] (reward and episode_return float32, done bool, episode_step
int64). If the environment has extra fields, a dict of these comes sixth. It expects

    ((action, ...), new_agent_state)

or a dict with the key "action" in place of the tuple, every leaf [1, E, ...]. The pool
hands the state back unchanged; if done is true, the agent begins with a new one. After
unroll_length steps (T) the pool enqueues

    ((env_outputs, agent_outputs), initial_agent_state)

into learner_queue, leaves [T+1, E, ...]. The outputs in row t are the agent's answer to
row t. Row 0 is the last row of the rollout before, and the state is the one before row 0.

With named_rows, rows are dicts. The batcher gets (row, agent_state), the agent answers
with a dict of outputs, and the queue gets (rows, initial_agent_state). A row has
observation, reward, done, episode_step, episode_return, the extra fields, and game_over,
game_step and game_return, which are the episode's unless the environment has such fields.
The queue's rows have the agent's outputs, too; of two fields with one name, the agent's.

Actions are what the policy draws: integers count from 0 whatever the action space's
start, and floats are float32. They must fit the action space of the environments. If these
have none, an action is one array of any dtype and shape, and is sent as it is.

If environments of a step were truncated, see Server, and the outputs are a dict with
"baseline" and "truncation_value" (both float32 [1, E, ...], of one shape), the pool also
asks the batcher about the final observation. Its baseline becomes the truncation_value of
that row.

Args:
    unroll_length: T, at least 1.
    learner_queue: a BatchingQueue with batch_dim 1.
    inference_batcher: a DynamicBatcher with batch_dim 1.
    env_server_addresses: one stream for each, such as "unix:/tmp/polybeast.0" or
        "host:port"; an address may occur several times. May be empty with a listener.
    initial_agent_state: nest of [layers, n, ...]; n is 1 (the same for every
        environment) or E. () for none.
    named_rows: hand out rows as dicts.
    max_rollout_bytes: of the rollouts in progress of all streams together, whose sizes the
        environments announce. A stream that would exceed it is refused. As much again may
        wait in the queue. None: half of the memory that this process may use.
    step_timeout_s: seconds that an environment may take for a step.
    maximum_downtime_s: the run ends if there is no stream at all for so long. A stream
        that is lost or refused is dialled again; its unfinished rollout is dropped and
        counted. An environment that has joined may come back within this time and goes on
        in its rollout.
    max_env_failures: environments that may raise, or break a rule after their first row,
        within a minute; each costs its stream.
        Unless this is 0, those of a single peer do not count while another one is
        connected: of an address, or of a machine from which environments join.
    hello: the "hello" that probe() returned: what all environments must be. None: the
        same as the first that connects or joins. Others are refused; see settle().
    expected: what environments must be, as the learner's flags say: a dict of name (str),
        num_envs (int) and settings (dict of str), each of which may be missing. Others
        are refused with the names of what differs.
    seed: of the run. Each stream gets it, with a number that no other stream has had, see
        Server. None: it gets neither. With a listener, the listener's seed counts.
    first_stream, stream_stride: the first stream of address i gets the number
        first_stream + i * stream_stride, later ones those that follow.
    listener: a Listener that has been started, or None. Environments that join there are
        run, too. It serves one pool at a time.
    security: a Security, for the servers.

Raises:
    ValueError: an argument is out of range, or the security is too little for an address.
""",
    "ActorPool.run": """
Run until close() is called or the queue or the batcher is closed; without servers, also
until the listener is closed. Call it once.

Raises the first error that ends it, after it has closed the queue and the batcher:
    ValueError: the agent's outputs do not fit; says where.
    RefusedError: all servers refuse, for example the token, or their environments can't be
        served.
    TransportError: there was no stream at all for too long; with the last reason.
    RuntimeError: environments raised too often; with the last one's traceback.
    AsyncError: inference failed.
""",
    "ActorPool.close": "End run(). Any thread may call it, any number of times.",
    "ActorPool.settle": """
The run has learned from its environments. Those that join and differ from them are refused
for good from here on. Before, they are told to try again later, and stats() counts them:
they may be the ones to learn from. Then close this pool and make another, see
Listener.probe().
""",
    "ActorPool.count": "The number of environment steps: E for each step of a stream.",
    "ActorPool.stats": """
Counters since the beginning: num_steps, num_rollouts, num_reconnects (streams that were
lost and came back), num_dropped_steps (of rollouts that were given up after a loss),
num_connected (streams now), num_refused (dialled streams), num_different (see settle()),
num_env_failures, bytes_copied, pool_bytes. Summed over streams: env_seconds (what the environments needed for their
steps), env_wait_seconds, inference_wait_seconds, queue_wait_seconds. last_error says why a
stream was lost last.
""",
    "ActorPool.events": """
What has happened to streams since the last call: a list of (seconds since 1970, kind,
text), and the number of older events that were forgotten. Kinds are "lost", "returned",
"refused", and "env_error", which means that an environment has raised. Refusals of
environments that have joined are the listener's.
""",
    "probe": """
Ask an environment server what it serves. It makes one environment for this and ends it.

Returns a dict:
    name: str, maybe empty
    num_envs: int, E
    observation_space: dict with "type" and, by type,
        Box            dtype (str), shape (tuple), low and high (None: unbounded; a float
                       for all elements; else a float64 array of that shape)
        Discrete       n, start (int)
        MultiDiscrete  n, start (tuples of int)
        MultiBinary    shape
        Tuple          spaces (tuple of such dicts)
        Dict           spaces (dict of such dicts)
    action_space: such a dict, of what the policy writes; None if there is none
    extra_fields: dict from name to a dict of dtype and shape, in the order of a step
    settings: dict of str, the flags that the environments were made with; maybe empty
    step_bytes: of all arrays of a step
    hello: bytes, for ActorPool and Listener.refuse()

`expected` and `security` are as of ActorPool.

Raises:
    RefusedError: the server refuses, for example the token, or is not as expected.
    TransportError: no answer within timeout_s seconds.
    WireError: the answer breaks the protocol's rules.
    RuntimeError: the environment raised; with its traceback.
""",
    "Listener": """
Lets environments dial the learner: those behind NAT, or those that come and go. Client is
their side. So is any program that speaks libtorchbeast/proto/torchbeast.proto.

An ActorPool that was given the listener runs them. Each has a place with an unroll. One
that is lost may come back and goes on where it was. One that has left between episodes
leaves its unroll to the next that joins.

Environments that join wait for a pool. It takes those that are alike, see
ActorPool.settle().

Args:
    address: "unix:/path" or "host:port"; port 0: a free one, see `address`.
    max_streams: places. If all are taken, further ones are told to try again later.
    expected, seed: as of ActorPool. Streams get numbers in the order in which they come.
    hello_timeout_s: seconds that an environment may take for its hello, which may need its
        first reset.
    security: a Security.

Raises:
    ValueError: an argument is out of range, or the security is too little for the address.
""",
    "Listener.start": """
Listen from here on, without blocking. Environments that join wait for a pool.

Raises:
    RuntimeError: it cannot listen there; says why.
""",
    "Listener.close": (
        """End all streams and remove the unix socket. Any thread may call it, any number of times."""
    ),
    "Listener.finish": """
The run is complete: Client.run() returns in all environments, also in those that join until
close(). Call it before ActorPool.close(). Without it they dial again.
""",
    "Listener.probe": """
Wait until an environment has joined that keeps the rules and waits for a pool, and describe
it as probe() does. `other_than`, a "hello": one that differs from it is preferred, if it
comes in time; a Client that was told to try again does so within a second.

Raises:
    TransportError: none within timeout_s seconds.
""",
    "Listener.refuse": """
Refuse environments with this "hello", which probe() returned, for this reason. probe()
then waits for another.
""",
    "Listener.events": (
        """As ActorPool.events(): who was refused, and which raised before the hello."""
    ),
    "Listener.address": "Where it listens, with the port that it has found.",
    "Listener.stats": """
num_streams (now), num_refused (since the beginning), last_refusal (why; maybe empty).
""",
    "Server": """
Serves environments: each stream has one of its own, made by env_class().

env_class() gives one of two.

A single environment, E = 1, with reset() and step(action) of the old Gym (observation; 4
values) or of Gymnasium (observation, info; 5 values). Its observation may be any nest of
arrays and numbers. The learner gets the attributes observation_space and action_space (of
gymnasium or gym: Box, Discrete, MultiDiscrete, MultiBinary, Tuple, Dict). Without an
observation_space, the first observation shows dtypes and shapes. Without an action_space,
step() gets the agent's array as it is, of one environment.
The step that ends an episode also resets the environment. Its row holds the first
observation of the next episode, the reward of the last step, and length and return of the
episode that has ended. Truncated episodes end as terminated ones do, and there are no
extra fields. step() gets an int for a Discrete action, else a NumPy array of the space's
dtype, nested as the space is. A Discrete's start is added, and floats are clipped into
their bounds.

E environments in lockstep, which reset themselves: an object with num_envs,
observation_space and action_space (of a single environment), and the methods initial()
and step(actions). These return a row: a dict of "observation" (nested), "reward", "done",
"episode_step", "episode_return" and any other fields, every array [E, ...]. The others
become extra fields of the pool, in the order of their names. If there is a field
"truncated" (bool [E]), the attribute final_observation (None or nested [E, ...]) holds the
last observations of truncated episodes. step() gets what the policy wrote, [E, ...],
nested as the action space is. torchbeast.envs.environment.Environment is such an object.
The arrays of a row must keep their contents until the next call.

Both may have a method begin_stream(seed, stream), which is called before the first reset()
or initial(): seed is the run's, and stream the number of this stream, which no other
stream of the run has had. A single environment without this method gets a seed made from
both, if its reset() takes one or if it has the seed() of the old Gym. There is no call if
the learner does not send these numbers, or only asks what is served.

If there is a method close(), it is called when the stream ends. An exception in any of
these travels to the learner as text, with its traceback.

Args:
    env_class: called without arguments, in a thread of the stream's own.
    server_address: "unix:/path" or "host:port"; port 0: a free one, see `address`.
    max_streams: at once; more are refused.
    name: of the environment, as probe() shows it, such as the --env of a run.
    settings: dict of str, the flags that the environments are made with. A learner that
        has others refuses them.
    security: a Security.

Raises:
    ValueError: an argument is out of range, or the security is too little for the address.
""",
    "Server.run": """
Serve until stop() is called; start() first, if that has not been done. Ctrl-C stops, too.

Raises:
    RuntimeError: as start().
""",
    "Server.start": """
Listen from here on, without blocking. A unix socket is the user's alone; one that a dead
server has left is replaced.

Args:
    here: make, step and close the environments of one stream at a time in the thread that
        calls run(), for environments that work in the main thread only. Streams that come
        meanwhile have threads of their own. Ctrl-C stops it at any time. A program's own
        handlers of signals run when Python code does, so stop() has to be called in
        another thread. While an environment hangs, run() does not return.

Raises:
    RuntimeError: it cannot listen there; says why.
""",
    "Server.stop": """
End all streams, wait for their environments to be closed, and remove the unix socket.
Environments that have not returned timeout_s seconds after the first call are left behind,
and a line on stderr names them. Any thread may call it, any number of times. If an
environment calls it, that one is not waited for.
""",
    "Server.address": "Where it listens, with the port that it has found.",
    "Server.stats": """
num_streams (now), and counters since the beginning: num_steps (E for each), num_refused,
bytes_copied.
""",
    "Client": """
Dials the learner, which listens, and runs one environment (of E) there.

Args:
    env_class: called once, without arguments; gives an environment as Server describes.
    learner_address: "unix:/path" or "host:port" of a Listener.
    name, settings, security: as of Server.
    maximum_downtime_s: seconds that there may be no learner, also at first. None or inf:
        for ever. Waiting for an action does not count.

Raises:
    ValueError: an argument is out of range, or the security is too little for the address.
""",
    "Client.run": """
Make the environment, dial, reset it once the learner has answered, and step as the learner
says, until stop() is called, Ctrl-C comes or the learner has completed its run, see
stats(). With num_episodes: until the episodes of all E have ended together so many times,
and leave then. A lost connection is dialled again, and the environment goes on where it
was. Call it once. `here`: the environment lives in this thread, see Server.start.

Raises:
    RefusedError: the learner refuses, for example the token.
    TransportError: no learner for too long.
    RuntimeError: the environment raised; with its traceback. The learner gets it, too.
""",
    "Client.stop": """
End run() after the step in progress, without waiting. An environment that has not returned
timeout_s seconds after the first call is left behind: run() returns, and a line on stderr
says where it hangs. Any thread may call it, any number of times.
""",
    "Client.stats": """
connected (now), finished (whether the learner has completed its run), and counters since
the beginning: num_steps (E for each), num_episodes (steps in which those of all E have
ended), num_reconnects. last_error says why there was no learner last.
""",
}
