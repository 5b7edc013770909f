exec(open('.device_scratch/gpu.py').read().split("x=torch.randn(4,3,32,32")[0])
sq=lambda o:o.float().square().mean()
cmp('lstm',lambda:nn.LSTM(8,16,2,dropout=.1,batch_first=True),(torch.randn(2,5,8,device='cuda'),),{},lambda o:sq(o[0]))
cmp('gru',lambda:nn.GRU(8,16,2,dropout=.1),(torch.randn(2,5,8,device='cuda'),),{},lambda o:sq(o[0]))
import transformers
cfg=transformers.GPT2Config()
ids=torch.randint(50257,(8,512),device='cuda')
r=cmp('gpt2 small bf16',lambda: transformers.GPT2LMHeadModel(cfg),(),dict(input_ids=ids,labels=ids),lambda o:o.loss,torch.bfloat16)
for k,m in (('eager',r[0]),('planned',r[1]),('eager',r[0]),('planned',r[1])):
    ts=[]
    for i in range(6):
        for p in m.parameters(): p.grad=None
        torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); t=time.time()
        with torch.autocast('cuda',torch.bfloat16): l=m(input_ids=ids,labels=ids).loss
        f=torch.cuda.memory_allocated()
        l.backward(); torch.cuda.synchronize(); ts.append(time.time()-t)
    print(k, 'step ms', [round(t*1e3,1) for t in ts], 'peak MiB', torch.cuda.max_memory_allocated()/2**20, 'after forward', f/2**20, flush=True)
plan=r[1].plan
lb=plan.live_bytes; i=lb.index(max(lb)); print('predicted', max(lb)/2**20, i, len(plan.program.forward_nodes), plan.nodes[i].name, plan.nodes[i].origin)
import subprocess; print(subprocess.run('python3 -m pytest -q tests/gpu -p no:cacheprovider -o addopts= -o pythonpath="tests src" 2>&1 | tail -15',shell=True,capture_output=True,text=True).stdout)
