import sys, torch, time, copy, traceback, warnings; warnings.filterwarnings('ignore')
sys.path[:0]=['src','tests']
import undertow as ut
print(torch.__version__, torch.cuda.get_device_name())
from exactness import same_bits
import torch.nn as nn
def cmp(name, make, args, kwargs, loss_of, autocast=None, steps=2):
    try:
        torch.manual_seed(0); eager=make().cuda().train(); eager2=copy.deepcopy(eager); other=copy.deepcopy(eager)
        t=time.time(); 
        with torch.autocast('cuda',autocast or torch.bfloat16,enabled=autocast is not None): planned=ut.plan(other,args,kwargs)
        pt=time.time()-t
        res=[]
        for m in (eager,eager2,planned):
            torch.manual_seed(3); o=torch.optim.SGD(m.parameters(),lr=0.01); r=[]
            for _ in range(steps):
                o.zero_grad()
                with torch.autocast('cuda',autocast or torch.bfloat16,enabled=autocast is not None): l=loss_of(m(*args,**kwargs))
                l.backward(); r+= [l.detach()]+[None if p.grad is None else p.grad.clone() for p in m.parameters()]+[b.clone() for b in m.buffers()]
                o.step()
            r.append(torch.cuda.get_rng_state()); res.append(r)
        d=sum(not same_bits(a,b) for a,b in zip(res[0],res[2])); e=sum(not same_bits(a,b) for a,b in zip(res[0],res[1]))
        mx=max([float((a.float()-b.float()).abs().max()) for a,b in zip(res[0],res[2]) if a is not None and a.numel()] or [0])
        print(f'{name}: planned differs {d}, eager run twice differs {e} of {len(res[0])}; max abs {mx:.2g}; plan {pt:.2f}s; no rule: {sorted({n.name for n in planned.plan.without_rule})}', flush=True)
        return eager, planned
    except Exception as ex:
        traceback.print_exc(); print(name,'ERR',str(ex)[:500],flush=True)
torch.backends.cudnn.deterministic=True
x=torch.randn(4,3,32,32,device='cuda')
sq=lambda o:o.float().square().mean()
cmp('convnet',lambda:nn.Sequential(nn.Conv2d(3,8,3),nn.BatchNorm2d(8),nn.ReLU(True),nn.Dropout(.2),nn.Flatten(),nn.LazyLinear(5)) if 0 else nn.Sequential(nn.Conv2d(3,8,3),nn.BatchNorm2d(8),nn.ReLU(True),nn.Dropout(.2),nn.Flatten(),nn.Linear(8*900,5)),(x,),{},sq)
for ac in (None,torch.bfloat16,torch.float16):
    cmp(f'encoder {ac}',lambda:nn.TransformerEncoderLayer(32,4,64,batch_first=True),(torch.randn(2,16,32,device='cuda'),),{},sq,ac)
cmp('lstm',lambda:nn.LSTM(8,16,2,dropout=.1,batch_first=True),(torch.randn(2,5,8,device='cuda'),),{},lambda o:sq(o[0]))
cmp('gru',lambda:nn.GRU(8,16,2,dropout=.1),(torch.randn(2,5,8,device='cuda'),),{},lambda o:sq(o[0]))
from undertow.models import SMALL
for n,z in SMALL.items():
    a=tuple(t.cuda() for t in z.example_inputs(3)); y=tuple(t.cuda() for t in z.example_targets(3))
    cmp('zoo '+n, z.build, a, {}, lambda o,z=z,y=y: z.loss(o,*y))
from families import FAMILIES
for n,(mk,b) in FAMILIES.items():
    kw={k:v.cuda() for k,v in b.items()}
    for ac in (None,torch.bfloat16): cmp(f'hf {n} {ac}', mk, (), kw, lambda o:o.loss, ac, steps=4)
import transformers
cfg=transformers.GPT2Config()
ids=torch.randint(50257,(8,512),device='cuda')
r=cmp('gpt2 small bf16',lambda: transformers.GPT2LMHeadModel(cfg),(),dict(input_ids=ids,labels=ids),lambda o:o.loss,torch.bfloat16)
if r:
    for k,m in (('eager',r[0]),('planned',r[1]),('eager',r[0]),('planned',r[1])):
        ts=[]
        for i in range(6):
            for p in m.parameters(): p.grad=None
            torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); t=time.time()
            with torch.autocast('cuda',torch.bfloat16): l=m(input_ids=ids,labels=ids).loss
            l.backward(); torch.cuda.synchronize(); ts.append(time.time()-t)
        print(k, 'step ms', [round(t*1e3,1) for t in ts], 'peak MiB', torch.cuda.max_memory_allocated()/2**20, flush=True)
